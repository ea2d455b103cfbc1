"""Flags of what people see: logs and the journal."""

from banyan.config.flags.flag import INT, SWITCH, Flag

FLAGS = (
    Flag(
        "log-level",
        "observe.log_level",
        "least severe log line that is shown",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"), ("critical", "error")),
    ),
    Flag(
        "log-requests",
        "observe.log_requests",
        "one line when a request ends: lengths, reason and seconds, never its text",
        kind=SWITCH,
    ),
    Flag(
        "journal",
        "observe.journal",
        "file that records every message, plan and result, for `banyan replay`",
        documented=False,
    ),
    Flag(
        "journal-bytes",
        "observe.journal_bytes",
        "size at which the journal starts over",
        kind=INT,
        low=1 << 20,
        documented=False,
    ),
)
