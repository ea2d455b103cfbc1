"""Flags of models of experts: what is recorded of their choices."""

from banyan.config.flags.flag import INT, SWITCH, Flag

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
        proof="tests/runner/test_expert_record.py::test_the_buffer_keeps_the_latest_passes",
    ),
    Flag(
        "enable-expert-distribution-metrics",
        "experts.reports",
        "a line in the log, every --decode-log-interval passes, of how evenly experts are chosen",
        kind=SWITCH,
        proof="tests/runner/test_expert_record.py::test_a_line_says_how_evenly_experts_are_chosen",
    ),
)
