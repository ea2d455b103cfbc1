"""Flags of what people see: logs and the journal."""

from banyan.config.flags.flag import INT, SWITCH, Flag

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
        "one line when a request ends: lengths, reason and seconds, never its text",
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
)
