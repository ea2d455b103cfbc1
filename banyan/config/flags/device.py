"""Flags of the machine: device, ranks, threads and kernels."""

from banyan.config.flags.flag import FLOAT, INT, INTS, JSON, SWITCH, Elsewhere, Flag

ATTENTION = (
    *(
        "auto",
        "torch_native",
        "ascend",
        "triton",
        "flex_attention",
        "dsa",
        "nsa",
        "qsa",
        "dsv4",
        "compressed",
        "fa3",
    ),
    *("flashinfer", "llada2_cfg_flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla", "fa4"),
    *("tokenspeed_mla", "trtllm_mha", "hpc_ops", "minicpm_flashattn", "minicpm_flashinfer"),
    *("aiter", "wave", "intel_amx", "intel_xpu", "cutlass_mla", "dual_chunk_flash_attn"),
)
"""All but the second: the device's own kernel attends."""

FLAGS = (
    Flag(
        "device",
        "device.name",
        "device to run on; auto = an accelerator where torch finds one, else the CPU; also a name "
        "that an installed package adds",
        choices=("auto", "cpu", "cuda", "npu"),
        plugins="banyan.platforms",
        elsewhere=(
            Elsewhere(
                "xpu hpu mps musa tpu",
                "it runs on CPUs, CUDA devices and Ascend NPUs only",
                "leave it out, or give --device cpu",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_the_device_is_the_one_that_is_named",
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
        "pipeline-parallel-size",
        "parallel.pp",
        "stages that the layers are divided into, each of --tensor-parallel-size ranks",
        kind=INT,
        aliases=("pp-size", "pp"),
        low=1,
        high=1024,
        proof="tests/system/test_stages.py::test_stages_hold_layers_that_one_rank_could_not_share",
    ),
    Flag(
        "expert-parallel-size",
        "parallel.ep",
        "ranks among which whole experts are shared out: 1 (each has a cut of every expert), or as "
        "many as --tensor-parallel-size",
        kind=INT,
        aliases=("ep-size", "ep"),
        low=1,
        high=1024,
        proof="tests/system/test_experts.py::test_experts_that_cannot_be_cut_are_shared_out_whole",
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
        "enable-dp-attention",
        "parallel.uses_dp_attention",
        "the replicas are groups of the --tensor-parallel-size ranks: each attends by itself, and "
        "all ranks share the feed-forward blocks",
        kind=SWITCH,
        proof="tests/system/test_joined.py::test_joined_replicas_give_the_tokens_of_one_rank",
    ),
    Flag(
        "enable-dp-lm-head",
        "parallel.are_heads_apart",
        "with --enable-dp-attention each replica has the weight of the logits by itself, instead "
        "of sharing it with the others",
        kind=SWITCH,
        proof="tests/parallel/test_joined.py::test_the_flags_decide_who_shares_what",
    ),
    Flag(
        "attn-cp-size",
        "parallel.cp",
        "shares that the tokens of prompts are divided into among the --tensor-parallel-size "
        "ranks: those of one share cut the heads, and see the keys of all",
        kind=INT,
        aliases=("attention-context-parallel-size",),
        low=1,
        high=1024,
        proof="tests/system/test_context.py::test_ranks_that_divide_prompts_give_the_tokens_of_one",
    ),
    Flag(
        "enable-nsa-prefill-context-parallel",
        "parallel.divides_prompts",
        "as many shares of prompts as ranks, where --attn-cp-size does not say how many; for any "
        "model that attends",
        kind=SWITCH,
        aliases=("enable-prefill-cp",),
        proof="tests/context_parallel/test_rules.py::test_the_switch_alone_makes_a_share_of_every_rank",
    ),
    Flag(
        "nsa-prefill-cp-mode",
        "parallel.cp_split",
        "how tokens are divided into shares: zigzag = stretches of a prompt, an early and a late "
        "one for each; interleave = in turn",
        aliases=("cp-strategy",),
        choices=("zigzag", "interleave"),
        translate=(("in-seq-split", "zigzag"), ("round-robin-split", "interleave")),
        proof="tests/parallel/test_context.py::test_the_flags_decide_who_computes_what",
    ),
    Flag(
        "moe-dense-tp-size",
        "parallel.dense_tp",
        "ranks that share a feed-forward block without experts, in a model of experts: 1 = each "
        "has it whole; default: all ranks",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_joined.py"
        "::test_dense_blocks_that_cannot_be_cut_are_whole_on_every_rank",
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
        proof="tests/engine_client/test_data_parallel.py::test_the_method_decides_which_engine_takes_a_request",
    ),
    Flag(
        "enable-memory-saver",
        "device.memory_saver",
        "memory of weights and cache may be given back while the server runs, by "
        "POST /release_memory_occupation; on a CPU",
        kind=SWITCH,
        proof="tests/system/test_memory.py::test_the_pages_of_the_cache_go_and_come_back_empty",
    ),
    Flag(
        "threads",
        "parallel.threads",
        "CPU threads of one rank; default: the cores this process may use, divided",
        kind=INT,
        low=1,
        high=4096,
        documented=False,
        proof="tests/system/test_flag_effects.py::test_an_engine_has_as_many_threads_as_it_is_told",
    ),
    Flag(
        "cpu-compiler",
        "device.compiler",
        "C++ compiler for the CPU kernels, tried before g++, clang++ and the ziglang package, and "
        "instead of kernels that a wheel brought along",
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
        proof="tests/system/test_flag_effects.py::test_kernels_that_are_forced_are_those_that_run",
    ),
    Flag(
        "nnodes",
        "parallel.nodes",
        "machines that the ranks, or joined replicas, are spread over; each is started with the "
        "same command line but for --node-rank",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "node-rank",
        "parallel.node",
        "which of the machines this is; 0 serves, the others keep processes for it",
        kind=INT,
        low=0,
        high=1023,
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "dist-init-addr",
        "parallel.meeting",
        "host:port at which node 0 listens for the others; the port above it is taken too",
        aliases=("nccl-init-addr",),
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "use-ray",
        "parallel.by_ray",
        "the Ray cluster that this machine belongs to starts the ranks beside the first: a node of "
        "--nnodes on each of its machines, or every rank by itself; needs the package ray",
        kind=SWITCH,
        documented=False,
        proof="tests/config/test_ray.py::test_ranks_that_ray_is_to_start_are_nodes",
    ),
    Flag(
        "dist-timeout",
        "parallel.meet_timeout_s",
        "seconds that a rank waits for the others",
        kind=FLOAT,
        low=0.1,
        high=1e6,
        proof="tests/parallel/test_groups.py::test_a_rank_waits_for_the_others_as_long_as_told",
    ),
    Flag(
        "disable-cuda-graph",
        "device.is_eager",
        "call the model anew at every step instead of replaying one that was recorded (slower)",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py"
        "::test_steps_are_recorded_unless_that_is_switched_off",
    ),
    Flag(
        "attention-backend",
        "device.attention",
        "torch_native = the attention that is written in torch, to bisect a wrong answer (slower); "
        "auto and every other name = the kernel of the device, but for those that an installed "
        "package adds",
        choices=ATTENTION,
        plugins="banyan.attention",
        proof="tests/system/test_flag_effects.py::test_torch_attends_when_it_is_named",
    ),
    Flag(
        "enable-fp32-lm-head",
        "device.exact_head",
        "compute logits from activations that are not rounded (slower)",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_an_exact_head_rounds_no_activations",
    ),
    Flag(
        "enable-deterministic-inference",
        "device.is_deterministic",
        "refuse what would let a token depend on the requests beside it: --model-impl transformers",
        kind=SWITCH,
        proof="tests/config/test_execution.py"
        "::test_a_promise_that_cannot_be_kept_is_refused_with_the_reason",
    ),
    Flag(
        "base-gpu-id",
        "device.first_number",
        "number of the device of rank 0, on devices that have numbers (CUDA, NPU)",
        kind=INT,
        low=0,
        proof="tests/engine/test_placement.py::test_ranks_take_devices_from_the_first_on_in_steps",
    ),
    Flag(
        "gpu-id-step",
        "device.number_step",
        "from the number of one rank's device to that of the next rank of this machine",
        kind=INT,
        low=1,
        proof="tests/engine/test_placement.py::test_ranks_take_devices_from_the_first_on_in_steps",
    ),
    Flag(
        "numa-node",
        "device.numa_nodes",
        "memory nodes whose cores the ranks run on: one for all, or one for each",
        kind=INTS,
        low=0,
        proof="tests/engine/test_placement.py::test_a_rank_runs_on_the_cores_of_its_node",
    ),
    Flag(
        "cuda-graph-bs",
        "device.shapes",
        "rows of the decode steps to capture, where steps are captured by shape (CUDA, NPU); "
        "default: what suits the device",
        kind=INTS,
        aliases=("cuda-graph-bs-decode",),
        low=1,
        high=4096,
        proof="tests/config/test_defaults.py::test_the_shapes_to_capture_are_those_that_are_named",
    ),
    Flag(
        "cuda-graph-max-bs",
        "device.largest_shape",
        "rows of the largest decode step to capture; default: what suits the device",
        kind=INT,
        aliases=("cuda-graph-max-bs-decode",),
        low=1,
        high=4096,
        proof="tests/config/test_defaults.py::test_the_shapes_to_capture_are_those_that_are_named",
    ),
    Flag(
        "disable-cuda-graph-padding",
        "device.is_unpadded",
        "launch decode steps anew whose rows are not just those of a captured one, instead of "
        "filling the next larger one up, where steps are captured by shape (CUDA, NPU)",
        kind=SWITCH,
        proof="tests/ascend/emulation/test_engine.py::test_a_step_is_filled_up_unless_that_is_switched_off",
    ),
    Flag(
        "cpu-offload-gb",
        "device.offload_gib",
        "GiB of device memory that each rank's weights give up: so many layers, spread over the "
        "model, lie in pinned memory of the host and come back ahead of their turn in each step; "
        "on a CPU all of them lie there already",
        kind=FLOAT,
        low=0,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_device_gives_up_what_was_asked_and_says_the_same",
    ),
    Flag(
        "offload-group-size",
        "device.offload_group",
        "in the place of --cpu-offload-gb: layers of a group, the last --offload-num-in-group of "
        "which lie in memory of the host",
        kind=INT,
        low=-1,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
    Flag(
        "offload-num-in-group",
        "device.offload_of_group",
        "how many layers of each group of --offload-group-size lie in memory of the host",
        kind=INT,
        low=1,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
    Flag(
        "offload-prefetch-step",
        "device.offload_ahead",
        "layers from memory of the host that are on their way while one of them runs: there are so "
        "many buffers on the device, and one more",
        kind=INT,
        low=0,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
)
