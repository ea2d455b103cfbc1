"""Trace: what was done when, as a file that chrome://tracing and Perfetto show.

Marks cut the time of one thread into spans; while nothing is recorded a mark costs a comparison.
"""

import json
import os
import time
from dataclasses import dataclass, field

MOST_SPANS = 100_000
"""Spans of one trace; later ones are counted and dropped."""
_MICRO = 1e6


@dataclass
class Trace:
    """Spans of several threads. Adding is safe from any of them."""

    began_s: float = field(default_factory=time.perf_counter)
    dropped: int = 0
    _spans: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def add(
        self, lane: str, name: str, began_s: float, seconds: float, **facts: int | float | str
    ) -> None:
        """One span. `began_s` is of time.perf_counter."""
        if len(self._spans) >= MOST_SPANS:
            self.dropped += 1
            return
        span = {"name": name, "ph": "X", "pid": os.getpid(), "tid": lane, "args": facts}
        moment = {"ts": (began_s - self.began_s) * _MICRO, "dur": seconds * _MICRO}
        self._spans.append({**span, **moment})

    def write(self, path: str) -> int:
        """Make the file; returns how many spans it has.

        Raises:
            OSError: it exists, or cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        spans = list(self._spans)
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"traceEvents": spans, "displayTimeUnit": "ms"}, file)
        return len(spans)


class Marks:
    """The spans of one thread, end to end.

    Attributes:
        totals: seconds spent by name, while it is not None (--show-time-cost).

    Args:
        lane: name of the thread in the trace.
    """

    def __init__(self, lane: str) -> None:
        self.trace: Trace | None = None
        """What is recorded into; set from any thread."""
        self.totals: dict[str, float] | None = None
        self.lane = lane
        self._since_s = 0.0

    def begin(self) -> None:
        """The next span begins here."""
        if self.trace is not None or self.totals is not None:
            self._since_s = time.perf_counter()

    def end(self, name: str, **facts: int | float | str) -> float:
        """What was done since the last `begin` or `end` was `name`; returns when it began."""
        trace, totals = self.trace, self.totals
        if trace is None and totals is None:
            return 0.0
        began_s, now = self._since_s, time.perf_counter()
        self._since_s = now
        if totals is not None:
            totals[name] = totals.get(name, 0.0) + now - began_s
        if trace is None or began_s < trace.began_s:  # the recording has begun in the middle of it
            return 0.0
        trace.add(self.lane, name, began_s, now - began_s, **facts)
        return began_s
