"""Expert flags: recording, expert parallelism and load balancing."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, Elsewhere, Flag

FLAGS = (
    Flag(
        "enable-single-batch-overlap",
        "experts.overlaps",
        "run shared experts on a second stream while rows travel to routed experts (CUDA, NPU)",
        kind=SWITCH,
        proof="tests/ascend/emulation/test_side_streams.py"
        "::test_a_flag_gives_shared_experts_a_stream",
    ),
    Flag(
        "expert-distribution-recorder-mode",
        "experts.recorder",
        "what /start_expert_distribution_record records: stat and stat_approx = sums per expert, "
        "per_pass = counts of each pass, per_token = the experts of each token; default: recording "
        "is off",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
        proof="tests/system/test_expert_record.py"
        "::test_what_is_recorded_equals_the_choices_of_the_routers",
    ),
    Flag(
        "expert-distribution-recorder-buffer-size",
        "experts.buffer",
        "number of latest passes to keep; -1 = all since the start; default: 1000",
        kind=INT,
        low=-1,
        proof="tests/moe/test_routing_record.py::test_the_buffer_keeps_the_latest_passes",
    ),
    Flag(
        "enable-expert-distribution-metrics",
        "experts.reports",
        "log how evenly experts are chosen, every --decode-log-interval passes",
        kind=SWITCH,
        proof="tests/moe/test_routing_record.py::test_a_line_says_how_evenly_experts_are_chosen",
    ),
    Flag(
        "enable-return-routed-experts",
        "experts.are_returned",
        "allow return_routed_experts in requests: the answer then lists the experts of each token",
        kind=SWITCH,
        proof="tests/system/test_routed_experts.py"
        "::test_what_an_answer_tells_is_what_the_routers_of_transformers_choose",
    ),
    Flag(
        "moe-a2a-backend",
        "experts.a2a",
        "all-to-all between expert-parallel ranks: none = every rank gets all rows, deepep = a "
        "rank gets the rows of its own experts (sets --expert-parallel-size to "
        "--tensor-parallel-size), ascend_fuseep = the same fused with the experts on Ascend A3 "
        "(SGLANG_NPU_FUSED_MOE_MODE)",
        choices=("none", "deepep", "ascend_fuseep"),
        elsewhere=(
            Elsewhere(
                "ascend_tp mooncake nixl mori flashinfer megamoe deepep_v2 pplx flashinfer_megamoe",
                "ranks exchange rows through shared memory or gloo, not through this library",
                "use deepep",
            ),
        ),
        proof="tests/parallel/test_dispatch.py::test_the_flags_decide_whether_rows_are_sent",
    ),
    Flag(
        "deepep-mode",
        "experts.a2a_mode",
        "with --moe-a2a-backend deepep: normal = exchange rows in pieces, low_latency = all at "
        "once, up to SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens per step, auto = all at "
        "once if they fit",
        choices=("normal", "low_latency", "auto"),
        proof="tests/moe/test_dispatch_rules.py::test_a_step_of_low_latency_is_within_the_bound",
    ),
    Flag(
        "ep-num-redundant-experts",
        "experts.redundant",
        "number of redundant expert copies per layer, a multiple of --expert-parallel-size",
        kind=INT,
        low=0,
        high=65536,
        proof="tests/moe/test_expert_location.py::test_copies_are_of_the_first_experts",
    ),
    Flag(
        "init-expert-location",
        "experts.location",
        "initial placement of experts: trivial (in order), or JSON or a file (.json, or the "
        "recorder's .safetensors) with physical_to_logical_map or logical_count",
        shown="trivial|FILE|JSON",
        proof="tests/moe/test_expert_location.py::test_a_location_is_read_from_json_and_files",
    ),
    Flag(
        "ep-dispatch-algorithm",
        "experts.dispatch",
        "which copy of an expert a token uses: static = by its position in the step, dynamic = in "
        "turn, fake = evenly spread wrong experts (benchmarks only); default: static",
        choices=("static", "dynamic", "fake"),
        proof="tests/moe/test_expert_location.py::test_the_algorithm_is_the_one_given",
    ),
    Flag(
        "enable-eplb",
        "experts.balances",
        "balance experts between ranks while requests run (EPLB), with --expert-parallel-size",
        kind=SWITCH,
        proof="tests/moe/test_balancer.py::test_what_experts_cannot_move_beside_is_named",
    ),
    Flag(
        "eplb-algorithm",
        "experts.algorithm",
        "deepseek = balance over all ranks, deepseek_hierarchical = keep each expert group on one "
        "memory node of --numa-node, auto = hierarchical if possible",
        choices=("auto", "deepseek", "deepseek_hierarchical"),
        elsewhere=(
            Elsewhere(
                "deepseek_vec deepseek_vec_hierarchical",
                "balancing uses summed loads, not loads per pass",
                "use auto",
            ),
            Elsewhere(
                "elasticity_aware",
                "a replica restarts as a whole if one of its ranks dies",
                "use auto",
            ),
        ),
        proof="tests/moe/test_balancer.py::test_the_algorithm_keeps_groups_together",
    ),
    Flag(
        "eplb-rebalance-num-iterations",
        "experts.iterations",
        "passes between two rebalances",
        kind=INT,
        low=1,
        high=10**9,
        proof="tests/moe/test_balancer.py::test_experts_move_after_so_many_passes",
    ),
    Flag(
        "eplb-rebalance-layers-per-chunk",
        "experts.chunk_layers",
        "layers whose experts move between two steps; default: all at once",
        kind=INT,
        low=1,
        proof="tests/moe/test_balancer.py::test_layers_move_in_chunks_between_steps",
    ),
    Flag(
        "eplb-min-rebalancing-utilization-threshold",
        "experts.threshold",
        "rebalance only while mean rank load / maximum rank load is at most this",
        kind=FLOAT,
        low=0.0,
        high=1.0,
        proof="tests/moe/test_balancer.py::test_even_loads_are_left_as_they_are",
    ),
)
