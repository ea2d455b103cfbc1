"""Pace: how fast requests have ended lately, and how long those that wait will therefore take."""

import math
from collections import deque

LATELY_S = 120.0
_APART_S = 0.5
"""Between two looks that are kept."""
UNKNOWN_S = 5
LEAST_WAIT_S, MOST_WAIT_S = 1, 600


class Pace:
    """Of one engine, from the counter of its heartbeats."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        """When, and how many had ended."""

    def saw(self, ended: int, now: float) -> None:
        looks = self._looks
        if looks and ended < looks[-1][1]:
            looks.clear()  # another engine, which counts anew
        if looks and now - looks[-1][0] < _APART_S:
            return
        looks.append((now, ended))
        while now - looks[0][0] > LATELY_S:
            looks.popleft()

    @property
    def per_s(self) -> float:
        """Ends per second; 0 when none has been seen."""
        if len(self._looks) < 2:
            return 0.0
        (from_s, before), (to_s, after) = self._looks[0], self._looks[-1]
        return (after - before) / (to_s - from_s)


def wait_s(waiting: int, per_s: float) -> int:
    """Whole seconds until those that wait now have ended; UNKNOWN_S where no pace is known."""
    if per_s <= 0:
        return UNKNOWN_S
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(waiting / per_s)))
