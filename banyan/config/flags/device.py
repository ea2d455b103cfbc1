"""Device flags: device, parallelism, threads and kernels."""

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
        "device to run on; auto = an accelerator if torch finds one, else the CPU; installed "
        "packages may add names",
        choices=("auto", "cpu", "cuda", "npu"),
        plugins="banyan.platforms",
        elsewhere=(
            Elsewhere(
                "xpu hpu mps musa tpu",
                "only CPU, CUDA and Ascend NPU devices are supported",
                "leave it out, or use --device cpu",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_the_device_is_the_one_that_is_named",
    ),
    Flag(
        "tensor-parallel-size",
        "parallel.tp",
        "tensor parallelism: ranks that share every layer",
        kind=INT,
        aliases=("tp-size", "tp"),
        low=1,
        high=1024,
        proof="tests/system/test_ranks.py::test_two_ranks_give_the_tokens_of_one",
    ),
    Flag(
        "pipeline-parallel-size",
        "parallel.pp",
        "pipeline parallelism: number of stages, each of --tensor-parallel-size ranks",
        kind=INT,
        aliases=("pp-size", "pp"),
        low=1,
        high=1024,
        proof="tests/system/test_stages.py::test_stages_hold_layers_that_one_rank_could_not_share",
    ),
    Flag(
        "expert-parallel-size",
        "parallel.ep",
        "expert parallelism: 1 = every rank holds a shard of every expert, or "
        "--tensor-parallel-size = every rank holds whole experts",
        kind=INT,
        aliases=("ep-size", "ep"),
        low=1,
        high=1024,
        proof="tests/system/test_experts.py::test_experts_that_cannot_be_cut_are_shared_out_whole",
    ),
    Flag(
        "enable-ep-moe",
        "parallel.whole_experts",
        "set --expert-parallel-size to --tensor-parallel-size for models with experts",
        kind=SWITCH,
        proof="tests/moe/test_dispatch_rules.py::test_the_switch_makes_experts_whole_on_every_rank",
    ),
    Flag(
        "data-parallel-size",
        "parallel.dp",
        "data parallelism: replicas of the model in one server",
        kind=INT,
        aliases=("dp-size", "dp"),
        low=1,
        high=1024,
        proof="tests/system/test_flag_effects.py::test_each_replica_is_a_process_of_its_own",
    ),
    Flag(
        "enable-dp-attention",
        "parallel.uses_dp_attention",
        "DP attention: --data-parallel-size groups of the --tensor-parallel-size ranks attend "
        "independently and share the MLP and expert layers",
        kind=SWITCH,
        proof="tests/system/test_joined.py::test_joined_replicas_give_the_tokens_of_one_rank",
    ),
    Flag(
        "enable-dp-lm-head",
        "parallel.replicates_lm_head",
        "with --enable-dp-attention: every replica holds the whole lm_head instead of a shard",
        kind=SWITCH,
        proof="tests/parallel/test_joined.py::test_the_flags_decide_who_shares_what",
    ),
    Flag(
        "attn-cp-size",
        "parallel.cp",
        "context parallelism: number of shards of a prompt's tokens among the "
        "--tensor-parallel-size ranks; attention heads are divided within a shard",
        kind=INT,
        aliases=("attention-context-parallel-size",),
        low=1,
        high=1024,
        proof="tests/system/test_context.py::test_ranks_that_divide_prompts_give_the_tokens_of_one",
    ),
    Flag(
        "enable-nsa-prefill-context-parallel",
        "parallel.divides_prompts",
        "set --attn-cp-size to the number of ranks unless it is given; for any model with "
        "attention",
        kind=SWITCH,
        aliases=("enable-prefill-cp",),
        proof="tests/context_parallel/test_rules.py::test_the_switch_alone_makes_a_share_of_every_rank",
    ),
    Flag(
        "nsa-prefill-cp-mode",
        "parallel.cp_split",
        "how context parallelism divides tokens: zigzag = an early and a late piece of the prompt "
        "per shard, interleave = round robin",
        aliases=("cp-strategy",),
        choices=("zigzag", "interleave"),
        translate=(("in-seq-split", "zigzag"), ("round-robin-split", "interleave")),
        proof="tests/parallel/test_context.py::test_the_flags_decide_who_computes_what",
    ),
    Flag(
        "moe-dense-tp-size",
        "parallel.dense_tp",
        "ranks that share a dense MLP of an MoE model; 1 = every rank holds it whole; default: all "
        "ranks",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_joined.py"
        "::test_dense_blocks_that_cannot_be_cut_are_whole_on_every_rank",
    ),
    Flag(
        "load-balance-method",
        "parallel.load_balance",
        "how requests are distributed over replicas; follow_bootstrap_room = by the bootstrap room "
        "of PD disaggregation, as prefill servers always do",
        choices=("round_robin", "total_requests", "total_tokens", "follow_bootstrap_room"),
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
        "allow POST /release_memory_occupation to free weights, KV cache and graphs while the "
        "server runs",
        kind=SWITCH,
        proof="tests/system/test_memory.py::test_the_pages_of_the_cache_go_and_come_back_empty",
    ),
    Flag(
        "enable-weights-cpu-backup",
        "device.weights_backup",
        "with --enable-memory-saver: released weights of a device stay in host memory, so resuming "
        "reads no files",
        kind=SWITCH,
        proof="tests/ascend/emulation/test_memory_saver.py"
        "::test_weights_with_a_backup_come_back_without_their_files",
    ),
    Flag(
        "threads",
        "parallel.threads",
        "CPU threads per rank; default: usable cores divided by the number of ranks",
        kind=INT,
        low=1,
        high=4096,
        documented=False,
        proof="tests/system/test_flag_effects.py::test_an_engine_has_as_many_threads_as_it_is_told",
    ),
    Flag(
        "cpu-compiler",
        "device.compiler",
        "C++ compiler for the CPU kernels, tried before g++, clang++ and the ziglang package; also "
        "replaces prebuilt kernels",
        documented=False,
        proof="tests/system/test_flag_effects.py::test_the_compiler_that_is_named_goes_first",
    ),
    Flag(
        "cpu-isa",
        "device.isa",
        "highest instruction set of the CPU kernels; default: the best of this machine",
        choices=("base", "avx2", "avx512", "vnni", "amx"),
        documented=False,
        proof="tests/system/test_flag_effects.py"
        "::test_no_higher_instructions_are_used_than_allowed",
    ),
    Flag(
        "kernels",
        "device.kernels",
        'JSON: force a kernel implementation per op, to bisect a wrong answer, e.g. {"rms_norm": '
        '"reference"}',
        kind=JSON,
        documented=False,
        proof="tests/system/test_flag_effects.py::test_kernels_that_are_forced_are_those_that_run",
    ),
    Flag(
        "nnodes",
        "parallel.nodes",
        "number of machines; start each with the same command line except for --node-rank",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "node-rank",
        "parallel.node",
        "number of this machine; node 0 serves HTTP",
        kind=INT,
        low=0,
        high=1023,
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "dist-init-addr",
        "parallel.meeting",
        "host:port where node 0 listens for the other nodes; the next port is used too",
        aliases=("nccl-init-addr",),
        proof="tests/system/test_nodes.py::test_two_nodes_give_the_tokens_of_one_rank",
    ),
    Flag(
        "use-ray",
        "parallel.by_ray",
        "let the Ray cluster of this machine start the other ranks, by node (--nnodes) or one by "
        "one; needs the package ray",
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
        "run every step eagerly instead of replaying recorded steps (slower)",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py"
        "::test_steps_are_recorded_unless_that_is_switched_off",
    ),
    Flag(
        "attention-backend",
        "device.attention",
        "torch_native = attention in plain PyTorch, to bisect a wrong answer (slower); other names "
        "= the device's kernel, or an installed package's",
        choices=ATTENTION,
        plugins="banyan.attention",
        proof="tests/system/test_flag_effects.py::test_torch_attends_when_it_is_named",
    ),
    Flag(
        "enable-fp32-lm-head",
        "device.exact_head",
        "compute logits from float32 activations (slower)",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_an_exact_head_rounds_no_activations",
    ),
    Flag(
        "enable-deterministic-inference",
        "device.is_deterministic",
        "refuse settings that let a token depend on other requests of the batch, such as "
        "--model-impl transformers",
        kind=SWITCH,
        proof="tests/config/test_execution.py"
        "::test_a_promise_that_cannot_be_kept_is_refused_with_the_reason",
    ),
    Flag(
        "base-gpu-id",
        "device.first_number",
        "device number of rank 0 (CUDA, NPU)",
        kind=INT,
        low=0,
        proof="tests/engine/test_placement.py::test_ranks_take_devices_from_the_first_on_in_steps",
    ),
    Flag(
        "gpu-id-step",
        "device.number_step",
        "difference between the device numbers of consecutive ranks on this machine",
        kind=INT,
        low=1,
        proof="tests/engine/test_placement.py::test_ranks_take_devices_from_the_first_on_in_steps",
    ),
    Flag(
        "numa-node",
        "device.numa_nodes",
        "NUMA node of each rank's cores: one for all ranks, or one per rank",
        kind=INTS,
        low=0,
        proof="tests/engine/test_placement.py::test_a_rank_runs_on_the_cores_of_its_node",
    ),
    Flag(
        "cuda-graph-bs",
        "device.shapes",
        "batch sizes of decode steps to capture (CUDA, NPU); default: the device's own",
        kind=INTS,
        aliases=("cuda-graph-bs-decode",),
        low=1,
        high=4096,
        proof="tests/config/test_defaults.py::test_the_shapes_to_capture_are_those_that_are_named",
    ),
    Flag(
        "cuda-graph-max-bs",
        "device.largest_shape",
        "largest batch size of a decode step to capture; default: the device's own",
        kind=INT,
        aliases=("cuda-graph-max-bs-decode",),
        low=1,
        high=4096,
        proof="tests/config/test_defaults.py::test_the_shapes_to_capture_are_those_that_are_named",
    ),
    Flag(
        "disable-cuda-graph-padding",
        "device.is_unpadded",
        "run decode steps eagerly if no captured batch size matches exactly, instead of padding to "
        "the next one (CUDA, NPU)",
        kind=SWITCH,
        proof="tests/ascend/emulation/test_engine.py::test_a_step_is_filled_up_unless_that_is_switched_off",
    ),
    Flag(
        "cpu-offload-gb",
        "device.offload_gib",
        "GiB of weights per rank to keep in pinned host memory; whole layers, prefetched in each "
        "step; no effect on a CPU",
        kind=FLOAT,
        low=0,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_device_gives_up_what_was_asked_and_says_the_same",
    ),
    Flag(
        "offload-group-size",
        "device.offload_group",
        "alternative to --cpu-offload-gb: layers per group; the last "
        "--offload-num-in-group of each stay in host memory",
        kind=INT,
        low=-1,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
    Flag(
        "offload-num-in-group",
        "device.offload_of_group",
        "layers of each group of --offload-group-size to keep in host memory",
        kind=INT,
        low=1,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
    Flag(
        "offload-prefetch-step",
        "device.offload_ahead",
        "offloaded layers to prefetch; the device holds one buffer more than this",
        kind=INT,
        low=0,
        high=1 << 20,
        proof="tests/ascend/emulation/test_offload.py::test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead",
    ),
)
