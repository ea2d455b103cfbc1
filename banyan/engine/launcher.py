"""Launchers: bring plans to the runner without blocking the loop.

`Threaded` runs plans in order in a worker thread. If the device works asynchronously, a second
thread waits for results. `Fanout` sends every plan to the other ranks first. `PipelineLauncher`
has several plans in flight: a turn moves each on by one stage and takes the next plan in. Without
a next plan the turn waits until the loop has reported (`go_on`) that none will come: otherwise the
first stage would idle during a turn that a plan could have used.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Protocol

from banyan.base.log import logger
from banyan.messages.plan import CopyResult, Mask, StepPlan, StepResult

log = logger(__name__)


class LaunchedStep(Protocol):
    """A step that may still run; both methods wait for it."""

    def result(self) -> StepResult: ...
    def copies(self) -> CopyResult | None: ...


class StepRunner(Protocol):
    """Runs plans on this rank."""

    def launch(
        self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None
    ) -> LaunchedStep: ...


class Handle:
    """One plan in flight. The launcher's thread writes it, the loop reads it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.tokens = _tokens_of(plan)
        """Tokens of the step, with DP attention of all replicas; in multi-step plans per step."""
        self.steps = 1 if plan.steps == 1 else min(row.count for row in plan.rows)
        """Most decode steps that the plan runs."""
        self.result: StepResult | None = None
        self.copies: CopyResult | None = None
        self.launch_s = 0.0
        """Launch time on an asynchronous device, else 0."""
        self.wait_s = 0.0
        """Wait for the result on an asynchronous device, from the end of the previous plan."""
        self._masks: dict[int, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def is_done(self) -> bool:
        return self.result is not None

    def mask(self, mask: Mask) -> None:
        """Deliver a mask that was not known when the plan was made."""
        with self._changed:
            self._masks[mask.row] = mask.bits
            self._changed.notify_all()

    def mask_of(self, row: int) -> bytes:
        """Wait for the mask of a row. The engine sends one for every masked row."""
        with self._changed:
            self._changed.wait_for(lambda: row in self._masks or self._is_closed)
            return self._masks.get(row, b"")

    def close(self) -> None:
        """No more masks will be delivered: end the waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _tokens_of(plan: StepPlan) -> int:
    if plan.replica_loads:
        return sum(load.tokens for load in plan.replica_loads)
    if plan.steps > 1:
        return len(plan.rows)
    return sum(row.count for row in plan.rows)


class Launcher(Protocol):
    def launch(self, plan: StepPlan) -> Handle: ...
    def close(self) -> None: ...


class Threaded:
    """Runs plans in order in a worker thread.

    Args:
        wake: called from a thread when a handle is done.
        is_async: `runner.launch` returns while the device still works. A second thread then waits
            for results, so that the next plan is launched while this one runs. A launch may wait
            for a mask that depends on the previous plan, so neither can be the loop's thread.
        inside: context of the launching thread, from its first plan to its last.
        executor: runs plans with control ops; None = `runner` gets them too.
        wake_next: lets the next plan wake the loop itself when its rows begin to run; returns
            False if it cannot. Woken earlier, the loop would work while the device is idle.
    """

    def __init__(
        self,
        runner: StepRunner,
        wake: Callable[[], None],
        is_async: bool = False,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
        wake_next: Callable[[], bool] = lambda: False,
        executor: StepRunner | None = None,
    ) -> None:
        self._runner = runner
        self._executor = executor or runner
        self._inside = inside
        self._wake = wake
        self._wake_next = wake_next
        self._queue: SimpleQueue[Handle | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[Handle, LaunchedStep | Exception] | None] | None = None
        self._open: list[Handle] = []
        self._threads = [threading.Thread(target=self._run, name="runner", daemon=True)]
        if is_async:
            self._launched = SimpleQueue()
            self._threads.append(threading.Thread(target=self._read, name="results", daemon=True))
        for thread in self._threads:
            thread.start()

    def launch(self, plan: StepPlan) -> Handle:
        handle = Handle(plan)
        self._open = [h for h in self._open if not h.is_done()]
        self._open.append(handle)
        self._queue.put(handle)
        return handle

    def close(self) -> None:
        for handle in self._open:
            handle.close()
        self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        with self._inside():
            self._launch_all()
        if self._launched is not None:
            self._launched.put(None)

    def _launch_all(self) -> None:
        item = self._queue.get()
        while item is not None:
            began = time.perf_counter()
            runner = self._executor if item.plan.control_ops else self._runner
            try:
                pending = runner.launch(item.plan, item.mask_of)
            except Exception as error:  # whatever it is, it must fail the step, not the engine
                pending = error
            if self._launched is None:
                settle(item, pending)
                item = self._next()
            else:
                item.launch_s = time.perf_counter() - began
                self._launched.put((item, pending))
                item = self._queue.get()

    def _next(self) -> Handle | None:
        """Get the next plan and wake the loop for the one that has ended."""
        try:
            item = self._queue.get_nowait()
        except Empty:
            self._wake()
            return self._queue.get()
        runs = item is not None and item.plan.rows and not item.plan.control_ops
        if not (runs and self._wake_next()):
            self._wake()
        return item

    def _read(self) -> None:
        assert self._launched is not None
        while (item := self._launched.get()) is not None:
            settle(*item, is_timed=True)
            self._wake()


def settle(handle: Handle, pending: LaunchedStep | Exception, is_timed: bool = False) -> None:
    """Wait for the result of a plan and store it. A failure fails the step, not the engine."""
    plan, began = handle.plan, time.perf_counter()
    try:
        if isinstance(pending, Exception):
            raise pending
        result, copies = pending.result(), pending.copies()
    except Exception as error:
        log.exception("step=%d failed", plan.step)
        result = StepResult(step=plan.step, error=f"{type(error).__name__}: {error}")
        failed = [copy.id for copy in plan.copies]
        copies = CopyResult(ids=[], failed=failed) if failed else None
    handle.copies = copies
    handle.wait_s = time.perf_counter() - began if is_timed else 0.0
    handle.result = result


class Fanout:
    """Sends plans to the other ranks, then runs them on this one.

    Args:
        local: launcher of rank 0.
        broadcast: sends one plan to every other rank.
    """

    def __init__(self, local: Launcher, broadcast: Callable[[StepPlan], None]) -> None:
        self._local = local
        self._broadcast = broadcast

    def launch(self, plan: StepPlan) -> Handle:
        self._broadcast(plan)
        return self._local.launch(plan)

    def close(self) -> None:
        self._local.close()


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
