"""ThroughputEstimate: requests finished per second lately, and the resulting wait of the queue."""

import math
from collections import deque

LATELY_S = 30.0
"""Length of the measured window, counting only time in which requests waited."""
UNKNOWN_S = 5
LEAST_WAIT_S, MOST_WAIT_S = 1, 600
_APART_S = 0.5
"""Least seconds between two measured heartbeats, unless the queue became empty or filled: each
finished request brings a heartbeat."""


class ThroughputEstimate:
    """The estimate for one engine, from its heartbeats.

    An idle engine finishes nothing, so its rate says nothing about a queue. The time between two
    heartbeats counts only if requests waited at the earlier one. The window is LATELY_S long.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque()
        """(seconds, requests finished in them)."""
        self._last: tuple[float, int, bool] | None = None
        """(time, finished so far, whether requests waited) of the last heartbeat."""

    def add(self, ended: int, waiting: int, now: float) -> None:
        if self._last is not None:
            at_s, before, was_busy = self._last
            if now - at_s < _APART_S and was_busy == (waiting > 0) and ended >= before:
                return
            if ended < before:
                self._spans.clear()  # a new engine counts from 0
            elif was_busy:
                self._spans.append((now - at_s, ended - before))
                while sum(seconds for seconds, _ in self._spans) > LATELY_S:
                    self._spans.popleft()
        self._last = (now, ended, waiting > 0)

    @property
    def per_s(self) -> float:
        """Requests finished per second; 0 without data."""
        seconds = sum(span for span, _ in self._spans)
        return sum(ended for _, ended in self._spans) / seconds if seconds > 0 else 0.0


def wait_s(waiting: int, per_s: float) -> int:
    """Whole seconds until the waiting requests have finished; UNKNOWN_S without an estimate."""
    if per_s <= 0:
        return UNKNOWN_S
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(waiting / per_s)))
