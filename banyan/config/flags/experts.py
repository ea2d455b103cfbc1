"""Flags of models of experts: what is told of their choices, and where they lie."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, Elsewhere, Flag

FLAGS = (
    Flag(
        "expert-distribution-recorder-mode",
        "experts.recorder",
        "what POST /start_expert_distribution_record keeps of the experts that tokens choose: sums "
        "(stat; stat_approx is the same), those of each pass, or the choices of each token; "
        "default: nothing can be recorded",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
        proof="tests/system/test_expert_record.py"
        "::test_what_is_recorded_equals_the_choices_of_the_routers",
    ),
    Flag(
        "expert-distribution-recorder-buffer-size",
        "experts.buffer",
        "latest passes that are kept; -1 = all since the start; default: 1000",
        kind=INT,
        low=-1,
        proof="tests/moe/test_routing_record.py::test_the_buffer_keeps_the_latest_passes",
    ),
    Flag(
        "enable-expert-distribution-metrics",
        "experts.reports",
        "a line in the log, every --decode-log-interval passes, of how evenly experts are chosen",
        kind=SWITCH,
        proof="tests/moe/test_routing_record.py::test_a_line_says_how_evenly_experts_are_chosen",
    ),
    Flag(
        "enable-return-routed-experts",
        "experts.are_told",
        "allow return_routed_experts in requests: the experts that each token chose, in the answer",
        kind=SWITCH,
        proof="tests/system/test_routed_experts.py"
        "::test_what_an_answer_tells_is_what_the_routers_of_transformers_choose",
    ),
    Flag(
        "moe-a2a-backend",
        "experts.a2a",
        "how rows come to experts on other ranks: all of them to all ranks (none), or each to the "
        "ranks that have one of its experts, and what these make of it back (deepep, which makes "
        "--expert-parallel-size as large as --tensor-parallel-size); ascend_fuseep: so too, by an "
        "operator of Ascend A3s that runs the experts as well (SGLANG_NPU_FUSED_MOE_MODE)",
        choices=("none", "deepep", "ascend_fuseep"),
        elsewhere=(
            Elsewhere(
                "ascend_tp mooncake nixl mori flashinfer megamoe deepep_v2 pplx flashinfer_megamoe",
                "it is a library for other devices and links; rows travel over memory that ranks "
                "share, or by gloo",
                "use deepep",
            ),
        ),
        proof="tests/parallel/test_dispatch.py::test_the_flags_decide_whether_rows_are_sent",
    ),
    Flag(
        "deepep-mode",
        "experts.a2a_mode",
        "with --moe-a2a-backend deepep: rows travel piece by piece (normal), or at once, which "
        "bounds the tokens of a step by SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK "
        "(low_latency); auto: at once in steps within that bound",
        choices=("normal", "low_latency", "auto"),
        proof="tests/moe/test_dispatch_rules.py::test_a_step_of_low_latency_is_within_the_bound",
    ),
    Flag(
        "ep-num-redundant-experts",
        "experts.redundant",
        "with --expert-parallel-size: places of each layer for copies of its experts, a multiple "
        "of the ranks",
        kind=INT,
        low=0,
        high=65536,
        proof="tests/moe/test_initial_placement.py::test_copies_are_of_the_first_experts",
    ),
    Flag(
        "init-expert-location",
        "experts.location",
        "which expert lies at each place at the start: trivial (in their order), or JSON or a file "
        "(.json, or .safetensors as the recorder writes it) with physical_to_logical_map or "
        "logical_count",
        shown="trivial|FILE|JSON",
        proof="tests/moe/test_initial_placement.py::test_a_location_is_read_from_json_and_files",
    ),
    Flag(
        "ep-dispatch-algorithm",
        "experts.dispatch",
        "which copy of an expert a token goes to: one by its place in the step (static), or each "
        "in turn (dynamic); fake: other experts than those it chose, all as often, for measuring "
        "alone; default: static",
        choices=("static", "dynamic", "fake"),
        proof="tests/moe/test_initial_placement.py::test_the_algorithm_is_the_one_given",
    ),
    Flag(
        "enable-eplb",
        "experts.balances",
        "with --expert-parallel-size: move experts between ranks while requests run, so that ranks "
        "have equal loads",
        kind=SWITCH,
        proof="tests/moe/test_balancer.py::test_what_experts_cannot_move_beside_is_named",
    ),
    Flag(
        "eplb-algorithm",
        "experts.algorithm",
        "deepseek balances over all ranks; deepseek_hierarchical keeps each group of experts on "
        "one memory node of --numa-node; auto: that where it can be",
        choices=("auto", "deepseek", "deepseek_hierarchical"),
        elsewhere=(
            Elsewhere(
                "deepseek_vec deepseek_vec_hierarchical",
                "loads are summed up, and not balanced pass by pass",
                "use auto",
            ),
            Elsewhere(
                "elasticity_aware",
                "a replica ends with the first of its ranks that dies, and is started anew",
                "use auto",
            ),
        ),
        proof="tests/moe/test_balancer.py::test_the_algorithm_keeps_groups_together",
    ),
    Flag(
        "eplb-rebalance-num-iterations",
        "experts.iterations",
        "passes whose choices are counted from one balance to the next",
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
        "nothing is moved while the mean load of the ranks is more than this share of the largest",
        kind=FLOAT,
        low=0.0,
        high=1.0,
        proof="tests/moe/test_balancer.py::test_even_loads_are_left_as_they_are",
    ),
)
