"""Flags of the scheduler: how many requests run, in which order, in which chunks."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, Flag

FLAGS = (
    Flag(
        "max-running-requests",
        "schedule.max_running",
        "requests that run at once; default: from the cache size",
        kind=INT,
        low=1,
    ),
    Flag(
        "max-queued-requests",
        "schedule.max_queued",
        "requests that may wait before new ones get 503; default: no bound",
        kind=INT,
        low=1,
    ),
    Flag(
        "chunked-prefill-size",
        "schedule.chunk_tokens",
        "prompt tokens per step; -1 = whole prompts",
        kind=INT,
        low=-1,
    ),
    Flag(
        "schedule-policy",
        "schedule.policy",
        "who goes first: fcfs = first come, lpm = longest cached prefix, lof = longest output",
        choices=("fcfs", "lpm", "lof"),
    ),
    Flag(
        "schedule-conservativeness",
        "schedule.conservativeness",
        "above 1 admits fewer requests so that fewer are retracted, below 1 more",
        kind=FLOAT,
        low=0.0,
        high=100.0,
    ),
    Flag(
        "disable-overlap-schedule",
        "schedule.depth",
        "one step at a time: plan the next only when the last is complete",
        kind=SWITCH,
        sets=1,
    ),
    Flag(
        "watchdog-timeout",
        "schedule.watchdog_s",
        "seconds after which a step that does not end counts as stuck",
        kind=FLOAT,
        low=0.1,
    ),
    Flag(
        "check-ledger",
        "schedule.check_ledger",
        "check after every step that each page and slot has exactly one owner (slow; for tests)",
        kind=SWITCH,
        documented=False,
    ),
)
