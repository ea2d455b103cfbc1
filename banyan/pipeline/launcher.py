"""Staged: the launcher of a replica whose layers lie in stages, with several plans in its line.

A turn moves every plan in the line on by one stage. Each turn takes the next plan in; where there
is none the line waits until the loop has said that none will come, because a stage that a plan
could have had would run nothing. The line is known only as a protocol.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from banyan.engine.launcher import Handle, PendingStep, settle
from banyan.messages.plan import StepPlan


class Line(Protocol):
    """What stages a plan passes (pipeline/runner_stage.py)."""

    def turn(
        self, plan: StepPlan | None, mask_of: Callable[[int], bytes] | None = None
    ) -> PendingStep | None: ...


class Staged:
    """Takes turns in a thread of its own.

    Args:
        line: of rank 0.
        wake: called from the thread whenever a handle is done.
        tell: sends every other rank what comes in in a turn.
    """

    def __init__(
        self, line: Line, wake: Callable[[], None], tell: Callable[[StepPlan | None], None]
    ) -> None:
        self._line = line
        self._wake = wake
        self._tell = tell
        self._changed = threading.Condition()
        self._coming: deque[Handle] = deque()
        self._passing: deque[Handle] = deque()
        self._goes_on = False
        """The loop knows of everything that has ended, and has no plan for the next turn."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Handle:
        handle = Handle(plan)
        with self._changed:
            self._goes_on = False
            self._coming.append(handle)
            self._changed.notify_all()
        return handle

    def go_on(self, in_flight: int) -> None:
        """There is no plan to follow those in flight. in_flight: how many the loop knows of; where
        one of them has just ended, the loop is to hear of that first."""
        with self._changed:
            self._goes_on = in_flight == len(self._coming) + len(self._passing)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for handle in (*self._coming, *self._passing):
                handle.close()
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while self._wait():
            try:
                pending = self._turn()
            except Exception as error:  # the ranks are no longer in step: nothing can run any more
                while self._passing or self._coming:
                    self._settle((self._passing or self._coming).popleft(), error)
                return
            if pending is not None:
                with self._changed:
                    handle = self._passing.popleft()
                    self._goes_on = False
                self._settle(handle, pending)

    def _wait(self) -> bool:
        """Until there is a turn to take; False when there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._coming or (self._passing and self._goes_on)
            )
            return not self._is_closed

    def _turn(self) -> PendingStep | None:
        handle = None
        with self._changed:
            if self._coming:
                handle = self._coming.popleft()
                self._passing.append(handle)
        self._tell(None if handle is None else handle.plan)
        if handle is None:
            return self._line.turn(None)
        return self._line.turn(handle.plan, handle.mask_of)

    def _settle(self, handle: Handle, pending: PendingStep | Exception) -> None:
        settle(handle, pending)
        self._wake()
