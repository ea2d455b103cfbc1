"""Watchdog: logs the stack traces of an engine that makes no progress.

The report has the threads of all ranks, the plans in flight and the queues. It is written once each
time the engine gets stuck. The watchdog ends nothing: the server does.
"""

import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from banyan.base.log import logger
from banyan.messages.plan import StepPlan

log = logger(__name__)

_LOOKS = 10
"""Checks within the limit."""
_MAX_LOOK_S = 1.0
_MAX_ROWS = 64


class RankMonitor(Protocol):
    """Signs of life of the ranks that run rank 0's plans."""

    def silence(self) -> tuple[int, float]:
        """The rank whose last sign of life is the oldest, and its age in seconds."""
        ...

    def stacks(self) -> Iterable[tuple[int, str]]:
        """(rank, stack traces of its threads); takes a second or two."""
        ...


class Watchdog:
    """Checks an engine from its own thread, from `start` to `close`.

    Args:
        limit_s: time without progress after which a report is written.
        stuck_s: current time without progress.
        plans: plans in flight, oldest first.
        queues: text about running and waiting requests.
        ranks: the other ranks; None if there is one.
        silence_s: time without a sign of life from a rank after which a report is written.
    """

    def __init__(
        self,
        limit_s: float,
        stuck_s: Callable[[], float],
        plans: Callable[[], list[StepPlan]],
        queues: Callable[[], str] = lambda: "",
        ranks: RankMonitor | None = None,
        silence_s: float = math.inf,
    ) -> None:
        self._limit_s = limit_s
        self._stuck_s = stuck_s
        self._plans = plans
        self._queues = queues
        self._ranks = ranks
        self._silence_s = silence_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        is_reported = False
        while not self._is_closed.wait(min(_MAX_LOOK_S, self._limit_s / _LOOKS)):
            trouble = self._trouble()
            if trouble and not is_reported:
                self.report(trouble)
            is_reported = bool(trouble)

    def _trouble(self) -> str:
        stuck_s = self._stuck_s()
        if stuck_s > self._limit_s:
            return f"the engine has made no progress for {stuck_s:.1f} s"
        rank, silent_s = self._ranks.silence() if self._ranks is not None else (0, 0.0)
        return f"rank {rank} has not run for {silent_s:.1f} s" if silent_s > self._silence_s else ""

    def report(self, trouble: str) -> None:
        """Log the state of everything; from any thread. Takes a second or two."""
        log.error("%s; stack traces of rank 0:", trouble)
        # The documented way to get the frames of other threads, in spite of the underscore.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for thread in threading.enumerate():
            if (frame := frames.get(thread.ident or 0)) and thread is not self._thread:
                lines = "".join(traceback.format_stack(frame)).rstrip()
                log.error("thread %s:\n%s", thread.name, lines)
        for plan in self._plans():
            log.error("in flight: %s", _describe(plan))
        log.error("queues: %s", self._queues())
        for rank, stacks in self._ranks.stacks() if self._ranks is not None else ():
            log.error("stack traces of rank %d:\n%s", rank, stacks)


def _describe(plan: StepPlan) -> str:
    """A plan as text, without the contents of prompts."""
    rows = " ".join(f"{r.slot}:{r.start}+{r.count}" for r in plan.rows[:_MAX_ROWS])
    return (
        f"step={plan.step} joins={len(plan.joins)} copies={len(plan.copies)} "
        f"rows={len(plan.rows)} (slot:start+count) {rows}"
    )
