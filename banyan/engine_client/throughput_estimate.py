"""Pace: how fast requests have ended lately, and how long those that wait will therefore take."""

import math
from collections import deque

LATELY_S = 30.0
"""Of time in which somebody waited: only then does the pace tell what the engine can."""
UNKNOWN_S = 5
LEAST_WAIT_S, MOST_WAIT_S = 1, 600
_APART_S = 0.5
"""Between two heartbeats that count, as long as requests wait in both or in neither: each end of a
request brings one."""


class Pace:
    """Of one engine, from its heartbeats.

    An engine with nothing to do ends nothing, and one with little to do ends what comes: neither
    says how fast a queue will go. So the time between two heartbeats counts when the earlier one
    told of requests that waited, and the last such times add up to LATELY_S.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque()
        """Seconds, and how many ended in them."""
        self._last: tuple[float, int, bool] | None = None
        """When the last heartbeat came, how many had ended, and whether requests waited."""

    def saw(self, ended: int, waiting: int, now: float) -> None:
        if self._last is not None:
            at_s, before, was_busy = self._last
            if now - at_s < _APART_S and was_busy == (waiting > 0) and ended >= before:
                return
            if ended < before:
                self._spans.clear()  # another engine, which counts anew
            elif was_busy:
                self._spans.append((now - at_s, ended - before))
                while sum(seconds for seconds, _ in self._spans) > LATELY_S:
                    self._spans.popleft()
        self._last = (now, ended, waiting > 0)

    @property
    def per_s(self) -> float:
        """Ends per second; 0 when none has been seen."""
        seconds = sum(span for span, _ in self._spans)
        return sum(ended for _, ended in self._spans) / seconds if seconds > 0 else 0.0


def wait_s(waiting: int, per_s: float) -> int:
    """Whole seconds until those that wait now have ended; UNKNOWN_S where no pace is known."""
    if per_s <= 0:
        return UNKNOWN_S
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(waiting / per_s)))
