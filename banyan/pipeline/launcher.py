"""PipelineLauncher: the launcher of a pipeline-parallel replica, with several plans in flight.

A turn moves every plan on by one stage and takes the next plan in. Without a next plan the turn
waits until the loop has reported (`go_on`) that none will come: otherwise the first stage would
idle during a turn that a plan could have used.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from banyan.engine.launcher import Handle, LaunchedStep, settle
from banyan.messages.plan import StepPlan


class StageTurns(Protocol):
    """The first stage of the pipeline (pipeline/runner_stage.py)."""

    def turn(
        self, plan: StepPlan | None, mask_of: Callable[[int], bytes] | None = None
    ) -> LaunchedStep | None: ...


class PipelineLauncher:
    """Takes turns in its own thread.

    Args:
        stage: of rank 0.
        wake: called from the thread when a handle is done.
        send: sends every other rank the plan that enters in a turn, or None.
    """

    def __init__(
        self, stage: StageTurns, wake: Callable[[], None], send: Callable[[StepPlan | None], None]
    ) -> None:
        self._stage = stage
        self._wake = wake
        self._send = send
        self._changed = threading.Condition()
        self._coming: deque[Handle] = deque()
        self._passing: deque[Handle] = deque()
        self._goes_on = False
        """The loop has seen every ended plan, and has none for the next turn."""
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
        """Let the next turn run without a new plan.

        Args:
            in_flight: plans in flight as the loop counts them. If one of them has just ended, the
                loop must see that first, so nothing happens.
        """
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
            except Exception as error:  # the ranks are out of step: nothing can run any more
                while self._passing or self._coming:
                    self._settle((self._passing or self._coming).popleft(), error)
                return
            if pending is not None:
                with self._changed:
                    handle = self._passing.popleft()
                    self._goes_on = False
                self._settle(handle, pending)

    def _wait(self) -> bool:
        """Wait for the next turn; False if there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._coming or (self._passing and self._goes_on)
            )
            return not self._is_closed

    def _turn(self) -> LaunchedStep | None:
        handle = None
        with self._changed:
            if self._coming:
                handle = self._coming.popleft()
                self._passing.append(handle)
        self._send(None if handle is None else handle.plan)
        if handle is None:
            return self._stage.turn(None)
        return self._stage.turn(handle.plan, handle.mask_of)

    def _settle(self, handle: Handle, pending: LaunchedStep | Exception) -> None:
        settle(handle, pending)
        self._wake()
