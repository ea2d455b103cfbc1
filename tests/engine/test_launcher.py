import threading

from banyan.base.ids import StepId
from banyan.engine.launcher import Fanout, Threaded
from banyan.messages.plan import Mask, StepPlan, StepResult

WAIT_S = 20


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


def test_a_masked_row_waits_for_its_mask():
    bell = Bell()
    launcher = Threaded(MaskedRunner(), bell.ring)
    handle = launcher.launch(StepPlan(step=StepId(1)))
    assert not handle.is_done()
    handle.mask(Mask(StepId(1), 0, b"bits"))
    bell.wait()
    assert handle.result.error == "bits"
    launcher.close()


def test_closing_releases_rows_that_wait_for_masks():
    launcher = Threaded(MaskedRunner(), lambda: None)
    handle = launcher.launch(StepPlan(step=StepId(1)))
    launcher.close()
    assert handle.is_done() and handle.result.error == ""


def test_plans_run_in_the_order_of_their_launch():
    seen, bell = [], Bell()

    class Runner:
        def launch(self, plan, mask_of=None):
            seen.append(plan.step)
            return Pending(StepResult(step=plan.step))

    launcher = Threaded(Runner(), bell.ring)
    for step in range(1, 6):
        launcher.launch(StepPlan(step=StepId(step)))
    for _ in range(5):
        bell.wait()
    launcher.close()
    assert seen == [1, 2, 3, 4, 5]


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
