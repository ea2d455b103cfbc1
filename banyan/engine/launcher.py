"""Launchers: how a plan gets to the runner without the loop waiting for it.

Threaded has one worker thread, plans in order; where the device works on while the host goes on, a
second one waits for results. Fanout sends every plan to the other ranks first. The runner is known
only as a protocol.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Protocol

from banyan.base.log import logger
from banyan.messages.plan import CopyResult, Mask, StepPlan, StepResult

log = logger(__name__)


class PendingStep(Protocol):
    def result(self) -> StepResult: ...
    def copies(self) -> CopyResult | None: ...


class Runner(Protocol):
    """What a launcher needs of the execution storey."""

    def launch(
        self, plan: StepPlan, mask_of: Callable[[int], bytes] | None = None
    ) -> PendingStep: ...


class Handle:
    """One plan in flight. Filled by the launcher's thread, read by the loop."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.tokens = _tokens_of(plan)
        """Those of other replicas in a joint step too; of a burst those of one step."""
        self.steps = 1 if plan.steps == 1 else min(row.count for row in plan.rows)
        """Decode steps that it holds at most."""
        self.result: StepResult | None = None
        self.copies: CopyResult | None = None
        self.launch_s = 0.0
        """What launching took, where the device works on while the host goes on."""
        self.wait_s = 0.0
        """What waiting for the result took then, from the end of the plan before on."""
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
        """The mask of a row; waits for it. The engine sends one for every masked row."""
        with self._changed:
            self._changed.wait_for(lambda: row in self._masks or self._is_closed)
            return self._masks.get(row, b"")

    def close(self) -> None:
        """Nobody will deliver masks any more."""
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
    """Runs plans one after another in a thread of its own.

    Args:
        runner: executes plans.
        wake: called from a thread whenever a handle is done.
        is_async: the runner's `launch` returns while the device still works: another thread waits
            for results, so that the next plan is launched while this one runs. A launch may wait
            for a mask that depends on the plan before it, so neither can be the loop's thread.
        inside: what the thread that launches works in, from its first plan to its last.
        ring_next: has the next plan wake the loop itself, once its rows run; False = it cannot.
            Woken before that, the loop would take its turn while nothing runs.
    """

    def __init__(
        self,
        runner: Runner,
        wake: Callable[[], None],
        is_async: bool = False,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
        ring_next: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runner = runner
        self._inside = inside
        self._wake = wake
        self._ring_next = ring_next
        self._queue: SimpleQueue[Handle | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[Handle, PendingStep | Exception] | None] | None = None
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
            try:
                pending = self._runner.launch(item.plan, item.mask_of)
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
        """The plan that follows one that has ended, of which the loop is told."""
        try:
            item = self._queue.get_nowait()
        except Empty:
            self._wake()
            return self._queue.get()
        runs = item is not None and item.plan.rows and not item.plan.control_ops
        if not (runs and self._ring_next()):
            self._wake()
        return item

    def _read(self) -> None:
        assert self._launched is not None
        while (item := self._launched.get()) is not None:
            settle(*item, is_timed=True)
            self._wake()


def settle(handle: Handle, pending: PendingStep | Exception, is_timed: bool = False) -> None:
    """Give a plan its result; waits for it. Whatever fails, fails the step and not the engine."""
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
    """Sends plans to the other ranks, then to this one. Ranks decide nothing.

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
