"""Reports collections of garbage that hold the process up (--gc-warning-threshold-secs)."""

import gc
from collections.abc import Mapping

from banyan.base.clock import Clock, WallClock
from banyan.base.log import logger

log = logger(__name__)


class SlowGc:
    """
    Args:
        threshold_s: a collection that takes longer is reported.
    """

    def __init__(self, threshold_s: float, clock: Clock | None = None) -> None:
        self._threshold_s = threshold_s
        self._clock = clock or WallClock()
        self._began_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """What the interpreter calls before and after each collection."""
        if phase == "start":
            self._began_s = self._clock.now()
            return
        took_s = self._clock.now() - self._began_s
        if took_s > self._threshold_s:
            log.warning(
                "garbage collection took seconds=%.3f generation=%d freed=%d",
                *(took_s, info["generation"], info["collected"]),
            )


def report_slow_gc(threshold_s: float) -> None:
    """From here on, in this process; 0 reports nothing."""
    if threshold_s > 0:
        gc.callbacks.append(SlowGc(threshold_s))
