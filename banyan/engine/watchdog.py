"""Watchdog: writes into the log where every thread of an engine stands that makes no progress, and
the plan that it is busy with. Once for each time it gets stuck. It ends nothing: the front does.
"""

import sys
import threading
import traceback
from collections.abc import Callable

from banyan.base.log import logger
from banyan.messages.plan import StepPlan

log = logger(__name__)

_LOOKS = 10
"""How often it looks within its limit."""
_MAX_LOOK_S = 1.0
_MAX_ROWS = 64


class Watchdog:
    """Looks at an engine from a thread of its own, from `start` to `close`.

    Args:
        limit_s: how long the engine may stand before the log is told.
        stuck_s: how long it has stood by now.
        plans: what is in flight, oldest first.
    """

    def __init__(
        self, limit_s: float, stuck_s: Callable[[], float], plans: Callable[[], list[StepPlan]]
    ) -> None:
        self._limit_s = limit_s
        self._stuck_s = stuck_s
        self._plans = plans
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        is_told = False
        while not self._is_closed.wait(min(_MAX_LOOK_S, self._limit_s / _LOOKS)):
            stuck_s = self._stuck_s()
            if stuck_s > self._limit_s and not is_told:
                self._tell(stuck_s)
            is_told = stuck_s > self._limit_s

    def _tell(self, stuck_s: float) -> None:
        log.error("the engine has made no progress for %.1f s; its threads stand here:", stuck_s)
        # Documented as the way to do this, underscore and all.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for thread in threading.enumerate():
            if (frame := frames.get(thread.ident or 0)) and thread is not self._thread:
                lines = "".join(traceback.format_stack(frame)).rstrip()
                log.error("thread %s:\n%s", thread.name, lines)
        for plan in self._plans():
            log.error("in flight: %s", _in_words(plan))


def _in_words(plan: StepPlan) -> str:
    """What a plan asks for; no text of any prompt."""
    rows = " ".join(f"{r.slot}:{r.start}+{r.count}" for r in plan.rows[:_MAX_ROWS])
    return (
        f"step={plan.step} joins={len(plan.joins)} copies={len(plan.copies)} "
        f"rows={len(plan.rows)} (slot:start+count) {rows}"
    )
