import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from banyan.base.ids import SlotId, StepId
from banyan.engine.launcher import Fanout, Threaded
from banyan.messages.plan import Mask, PageCopy, Row, StepPlan, StepResult

WAIT_S = 60


class Pending:
    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result

    def copies(self):
        return None


class MaskedRunner:
    """Returns the mask of row 0 as the step's error text."""

    def launch(self, plan, mask_of=None):
        return Pending(StepResult(step=plan.step, error=mask_of(0).decode()))


class Bell:
    def __init__(self):
        self._rung = threading.Semaphore(0)

    def ring(self):
        self._rung.release()

    def wait(self):
        assert self._rung.acquire(timeout=WAIT_S)


LAUNCHERS = pytest.mark.parametrize("is_async", [False, True])


@LAUNCHERS
def test_a_masked_row_waits_for_its_mask(is_async):
    bell = Bell()
    launcher = Threaded(MaskedRunner(), bell.ring, is_async)
    handle = launcher.launch(StepPlan(step=StepId(1)))
    assert not handle.is_done()
    handle.mask(Mask(StepId(1), 0, b"bits"))
    bell.wait()
    assert handle.result.error == "bits"
    launcher.close()


@LAUNCHERS
def test_closing_releases_rows_that_wait_for_masks(is_async):
    launcher = Threaded(MaskedRunner(), lambda: None, is_async)
    handle = launcher.launch(StepPlan(step=StepId(1)))
    launcher.close()
    assert handle.is_done() and handle.result.error == ""


@LAUNCHERS
def test_plans_run_in_the_order_of_their_launch(is_async):
    seen, bell = [], Bell()

    class Runner:
        def launch(self, plan, mask_of=None):
            seen.append(plan.step)
            return Pending(StepResult(step=plan.step))

    launcher = Threaded(Runner(), bell.ring, is_async)
    for step in range(1, 6):
        launcher.launch(StepPlan(step=StepId(step)))
    for _ in range(5):
        bell.wait()
    launcher.close()
    assert seen == [1, 2, 3, 4, 5]


@LAUNCHERS
def test_all_plans_are_launched_inside_of_what_is_given(is_async):
    seen, bell = [], Bell()

    @contextmanager
    def inside():
        seen.append(threading.current_thread().name)
        yield
        seen.append("left")

    class Runner:
        def launch(self, plan, mask_of=None):
            seen.append(threading.current_thread().name)
            return Pending(StepResult(step=plan.step))

    launcher = Threaded(Runner(), bell.ring, is_async, inside)
    for step in (1, 2):
        launcher.launch(StepPlan(step=StepId(step)))
        bell.wait()
    launcher.close()
    assert seen == ["runner"] * 3 + ["left"]


def test_other_ranks_get_every_plan_before_this_one_runs_it():
    order = []

    class Local:
        def launch(self, plan):
            order.append(("local", plan.step))

        def close(self):
            order.append("closed")

    fanout = Fanout(Local(), lambda plan: order.append(("sent", plan.step)))
    fanout.launch(StepPlan(step=StepId(1)))
    fanout.close()
    assert order == [("sent", 1), ("local", 1), "closed"]


def test_the_next_plan_is_launched_while_the_device_works_on_this_one():
    bell, both, results = (
        Bell(),
        threading.Semaphore(0),
        {1: threading.Event(), 2: threading.Event()},
    )

    class Working:
        def __init__(self, step):
            self._step = step

        def result(self):
            assert results[self._step].wait(WAIT_S)
            return StepResult(step=self._step)

        def copies(self):
            return None

    class Device:
        def launch(self, plan, mask_of=None):
            both.release()
            return Working(plan.step)

    launcher = Threaded(Device(), bell.ring, is_async=True)
    handles = [launcher.launch(StepPlan(step=StepId(step))) for step in (1, 2)]
    for _ in handles:
        assert both.acquire(timeout=WAIT_S)  # both are launched, neither has a result
    assert not any(handle.is_done() for handle in handles)
    results[1].set()
    bell.wait()
    assert [handle.is_done() for handle in handles] == [True, False]
    results[2].set()
    bell.wait()
    assert handles[1].result.step == 2
    launcher.close()


class Broken:
    """Fails on demand."""

    def __init__(self, where):
        self._where = where

    def _go(self, where):
        if where == self._where:
            raise RuntimeError("no room")

    def launch(self, plan, mask_of=None):
        self._go("launch")
        return self

    def result(self):
        self._go("result")
        return StepResult(step=StepId(1))

    def copies(self):
        self._go("copies")


@LAUNCHERS
@pytest.mark.parametrize("where", ["launch", "result", "copies"])
def test_what_fails_fails_its_step_and_its_copies(is_async, where):
    bell = Bell()
    launcher = Threaded(Broken(where), bell.ring, is_async)
    copy = PageCopy(id=4, group=0, src=1, dst=2, when="before")
    handle = launcher.launch(StepPlan(step=StepId(1), copies=[copy]))
    bell.wait()
    assert handle.result.error == "RuntimeError: no room" and handle.copies.failed == [4]
    launcher.close()


@LAUNCHERS
def test_launching_and_waiting_are_distinguished_where_they_overlap(is_async, monkeypatch):
    bell, clock = Bell(), [0.0]
    monkeypatch.setattr(
        "banyan.engine.launcher.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )

    class Slow(Pending):
        def result(self):
            clock[0] += 3.0
            return super().result()

    class Runner:
        def launch(self, plan, mask_of=None):
            clock[0] += 2.0
            return Slow(StepResult(step=plan.step))

    launcher = Threaded(Runner(), bell.ring, is_async)
    handle = launcher.launch(StepPlan(step=StepId(1)))
    bell.wait()
    launcher.close()
    assert (handle.launch_s, handle.wait_s) == ((2.0, 3.0) if is_async else (0.0, 0.0))


@pytest.mark.parametrize(
    ("rows", "can", "message"),
    [
        ([Row(SlotId(1), 0, 1)], True, ["run 1", "next", "run 2", "wake"]),
        ([Row(SlotId(1), 0, 1)], False, ["run 1", "next", "wake", "run 2", "wake"]),
        ([], True, ["run 1", "wake", "run 2", "wake"]),
    ],
    ids=["runs", "cannot ring", "has nothing to run"],
)
def test_a_plan_that_runs_next_wakes_the_loop_itself(rows, can, message):
    seen, over = [], threading.Semaphore(0)
    both_are_there = threading.Event()

    class Runner:
        def launch(self, plan, mask_of=None):
            assert both_are_there.wait(WAIT_S)
            seen.append(f"run {plan.step}")
            return Pending(StepResult(step=plan.step))

    def wake_next():
        seen.append("next")
        return can

    def wake():
        seen.append("wake")
        over.release()

    launcher = Threaded(Runner(), wake, wake_next=wake_next)
    first = launcher.launch(StepPlan(step=StepId(1)))
    second = launcher.launch(StepPlan(step=StepId(2), rows=rows))
    both_are_there.set()
    for _ in range(message.count("wake")):
        assert over.acquire(timeout=WAIT_S)
    launcher.close()
    assert seen == message and first.is_done() and second.is_done()
