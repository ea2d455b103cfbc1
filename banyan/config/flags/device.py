"""Flags of the machine: device, ranks, threads and kernels."""

from banyan.config.flags.flag import INT, JSON, Elsewhere, Flag

FLAGS = (
    Flag(
        "device",
        "device.name",
        "device to run on",
        choices=("auto", "cpu"),
        elsewhere=(
            Elsewhere(
                "cuda npu xpu hpu mps musa tpu",
                "it runs on the CPU only",
                "leave it out, or give --device cpu",
            ),
        ),
        proof="tests/system/test_flag_effects.py"
        "::test_forced_kernels_threads_and_depth_are_what_the_engine_reports",
    ),
    Flag(
        "tensor-parallel-size",
        "parallel.tp",
        "ranks that share every layer",
        kind=INT,
        aliases=("tp-size", "tp"),
        low=1,
        high=1024,
        proof="tests/system/test_ranks.py::test_two_ranks_give_the_tokens_of_one",
    ),
    Flag(
        "data-parallel-size",
        "parallel.dp",
        "replicas of the model behind one server",
        kind=INT,
        aliases=("dp-size", "dp"),
        low=1,
        high=1024,
        proof="tests/system/test_flag_effects.py::test_each_replica_is_a_process_of_its_own",
    ),
    Flag(
        "load-balance-method",
        "parallel.load_balance",
        "which replica takes a request",
        choices=("round_robin", "total_requests", "total_tokens"),
        elsewhere=(
            Elsewhere(
                "follow_bootstrap_room",
                "there are no prefill servers to follow",
                "use round_robin",
            ),
        ),
        translate=(
            ("auto", "round_robin"),
            ("shortest_queue", "total_requests"),
            ("minimum_tokens", "total_tokens"),
        ),
        proof="tests/frontend/test_fleet.py::test_the_method_decides_which_engine_takes_a_request",
    ),
    Flag(
        "threads",
        "parallel.threads",
        "CPU threads of one rank; default: the cores this process may use, divided",
        kind=INT,
        low=1,
        high=4096,
        documented=False,
        proof="tests/system/test_flag_effects.py"
        "::test_forced_kernels_threads_and_depth_are_what_the_engine_reports",
    ),
    Flag(
        "cpu-compiler",
        "device.compiler",
        "C++ compiler for the CPU kernels, tried before g++, clang++ and the ziglang package",
        documented=False,
        proof="tests/system/test_flag_effects.py::test_the_compiler_that_is_named_goes_first",
    ),
    Flag(
        "cpu-isa",
        "device.isa",
        "highest instruction set for the CPU kernels; default: the best of this machine",
        choices=("base", "avx2", "avx512", "vnni", "amx"),
        documented=False,
        proof="tests/system/test_flag_effects.py"
        "::test_no_higher_instructions_are_used_than_allowed",
    ),
    Flag(
        "kernels",
        "device.kernels",
        'force implementations to bisect a wrong answer, e.g. {"rms_norm": "reference"}',
        kind=JSON,
        documented=False,
        proof="tests/system/test_flag_effects.py"
        "::test_forced_kernels_threads_and_depth_are_what_the_engine_reports",
    ),
)
