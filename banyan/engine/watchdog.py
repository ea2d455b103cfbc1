"""Watchdog: writes into the log where every thread of an engine stands that makes no progress, on
all ranks, with the plans that it is busy with and what waits. Once for each time it gets stuck. It
ends nothing: the server does.
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
"""How often it looks within its limit."""
_MAX_LOOK_S = 1.0
_MAX_ROWS = 64


class OtherRanks(Protocol):
    """The ranks that run rank 0's plans."""

    def silence(self) -> tuple[int, float]:
        """The rank that has given no sign of life for longest, and for how many seconds."""
        ...

    def stacks(self) -> Iterable[tuple[int, str]]:
        """(rank, where its threads stand); takes a second or two."""
        ...


class Watchdog:
    """Looks at an engine from a thread of its own, from `start` to `close`.

    Args:
        limit_s: how long the engine may stand before the log is told.
        stuck_s: how long it has stood by now.
        plans: what is in flight, oldest first.
        queues: what runs and waits, in words.
        ranks: the others; None when there is one only.
        silence_s: how long one of them may give no sign of life.
    """

    def __init__(
        self,
        limit_s: float,
        stuck_s: Callable[[], float],
        plans: Callable[[], list[StepPlan]],
        queues: Callable[[], str] = lambda: "",
        ranks: OtherRanks | None = None,
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
        is_told = False
        while not self._is_closed.wait(min(_MAX_LOOK_S, self._limit_s / _LOOKS)):
            trouble = self._trouble()
            if trouble and not is_told:
                self.tell(trouble)
            is_told = bool(trouble)

    def _trouble(self) -> str:
        stuck_s = self._stuck_s()
        if stuck_s > self._limit_s:
            return f"the engine has made no progress for {stuck_s:.1f} s"
        rank, silent_s = self._ranks.silence() if self._ranks is not None else (0, 0.0)
        return f"rank {rank} has not run for {silent_s:.1f} s" if silent_s > self._silence_s else ""

    def tell(self, trouble: str) -> None:
        """Write down where everything stands; from any thread. Takes a second or two."""
        log.error("%s; the threads of rank 0 stand here:", trouble)
        # Documented as the way to do this, underscore and all.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for thread in threading.enumerate():
            if (frame := frames.get(thread.ident or 0)) and thread is not self._thread:
                lines = "".join(traceback.format_stack(frame)).rstrip()
                log.error("thread %s:\n%s", thread.name, lines)
        for plan in self._plans():
            log.error("in flight: %s", _in_words(plan))
        log.error("queues: %s", self._queues())
        for rank, stacks in self._ranks.stacks() if self._ranks is not None else ():
            log.error("rank %d stands here:\n%s", rank, stacks)


def _in_words(plan: StepPlan) -> str:
    """What a plan asks for; no text of any prompt."""
    rows = " ".join(f"{r.slot}:{r.start}+{r.count}" for r in plan.rows[:_MAX_ROWS])
    return (
        f"step={plan.step} joins={len(plan.joins)} copies={len(plan.copies)} "
        f"rows={len(plan.rows)} (slot:start+count) {rows}"
    )
