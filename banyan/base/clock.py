"""Clocks. The engine takes all its times from a Clock, as float seconds."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary fixed point; never goes backwards."""
        ...


class WallClock:
    """Monotonic wall time."""

    now = staticmethod(time.monotonic)


class VirtualClock:
    """Time that moves only by `advance_to`, for the simulator, replay and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"clock moved backwards: {self._now_s} -> {now_s}"
        self._now_s = now_s
