"""Flags of what people see: logs and the journal."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, Flag

FLAGS = (
    Flag(
        "log-level",
        "observe.log_level",
        "least severe log line that is shown",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"), ("critical", "error")),
        proof="tests/system/test_flag_effects.py::test_a_log_level_hides_what_is_less_severe",
    ),
    Flag(
        "log-requests",
        "observe.log_requests",
        "one line when a request ends or is refused; --log-requests-level says what it tells",
        kind=SWITCH,
        proof="tests/frontend/test_request_log.py::test_nothing_is_logged_unless_asked_for",
    ),
    Flag(
        "log-requests-format",
        "observe.log_format",
        "json = the lines of --log-requests are JSON objects",
        choices=("text", "json"),
        proof="tests/frontend/test_request_log.py::test_a_line_is_a_json_object_when_that_is_asked_for",
    ),
    Flag(
        "journal",
        "observe.journal",
        "file that records every message, plan and result, for `banyan replay`",
        documented=False,
        proof="tests/system/test_journal.py"
        "::test_replaying_the_journal_of_20_mixed_requests_finds_no_difference",
    ),
    Flag(
        "journal-bytes",
        "observe.journal_bytes",
        "size at which the journal starts over",
        kind=INT,
        low=1 << 20,
        documented=False,
        proof="tests/engine/test_journal.py::test_the_journal_is_as_large_as_the_flag_says",
    ),
    Flag(
        "log-requests-level",
        "observe.log_detail",
        "what a line of --log-requests tells: 0 = lengths and times, 1 = sampling parameters too, "
        "2 = the beginning of prompt and answer too, 3 = all of both",
        kind=INT,
        low=0,
        high=3,
        proof="tests/frontend/test_request_log.py::test_a_level_decides_what_a_line_tells",
    ),
    Flag(
        "log-level-http",
        "observe.http_level",
        "info or debug = one line for each HTTP request",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"), ("critical", "error")),
        proof="tests/server/test_access_log.py::test_each_request_leaves_a_line_when_asked_for",
    ),
    Flag(
        "decode-log-interval",
        "observe.step_log_interval",
        "steps that generate between two lines about the load: requests, tokens/s, pages, hits; "
        "0 = none",
        kind=INT,
        low=0,
        proof="tests/engine/test_step_log.py::test_so_many_steps_pass_between_two_lines",
    ),
    Flag(
        "gc-warning-threshold-secs",
        "observe.slow_gc_s",
        "report collections of garbage that take longer; 0 = none",
        kind=FLOAT,
        low=0.0,
        proof="tests/engine/test_slow_gc.py::test_a_collection_that_takes_long_is_reported",
    ),
)
