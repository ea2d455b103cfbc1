"""When a plan holds several decode steps, and what is planned behind one that ends early."""

from array import array

import pytest

from banyan.messages.plan import SAMPLE, StepPlan, StepResult
from banyan.messages.requests import Abort, Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.output_processor import partial_tokens
from tests.scheduler.driver import Driver, continuation, next_token

PROMPT = [3, 1, 4, 1, 5]
STEPS = 4


class Bursting(Driver):
    """Its runner ends every burst after `ran` steps."""

    def __init__(self, ran: int = STEPS, **limits) -> None:
        super().__init__(multi_step=STEPS, **limits)
        self.ran = ran

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.leaves:
            del self.slots[slot]
        for join in plan.joins:
            self.slots[join.slot] = list(array("i", join.tokens))
        counts = [row.count for row in plan.rows] if plan.steps > 1 else [1]
        sampled = []
        for row in plan.rows:
            history, before = self.slots[row.slot], len(self.slots[row.slot])
            for _ in range(min(self.ran, *counts, plan.steps) if row.want & SAMPLE else 0):
                history.append(next_token(history))
            sampled.append(array("i", history[before:]).tobytes())
        return StepResult(step=plan.step, tokens=sampled)

    def first_multi_step(self) -> StepPlan:
        """Behind the prompt."""
        self.step()
        plan = self.launch()
        assert plan is not None
        return plan


def asked(driver: Driver, name: str = "a", new: int = 20, stride: int = 0, **wishes) -> None:
    sampling = wishes.pop("sampling", {})
    driver.receive(
        Generate(
            request=name,
            tokens=array("i", PROMPT).tobytes(),
            sampling=SamplingParams(max_new_tokens=new, **sampling),
            stream_interval=stride,
            **wishes,
        )
    )


@pytest.mark.parametrize("ran", [1, 2, STEPS])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_is_the_same_however_long_its_bursts_are(ran: int, depth: int) -> None:
    driver = Bursting(ran, depth=depth)
    asked(driver, new=21)
    asked(driver, "b", new=6)
    driver.run()
    assert driver.outputs == {"a": continuation(PROMPT, 21), "b": continuation(PROMPT, 6)}
    assert any(plan.steps > 1 for plan in driver.plans)


def test_a_burst_has_pages_and_tokens_for_all_of_its_steps() -> None:
    driver = Bursting()
    asked(driver)
    (row,) = driver.first_multi_step().rows
    assert (row.start, row.count, row.drafts) == (5, STEPS, STEPS - 1)
    plan = driver.plans[-1]
    assert plan.steps == STEPS
    assert [grant.first for grant in plan.grants] == [2], "positions 5 to 8, pages of 4"


def test_a_burst_does_not_go_past_the_end_of_a_request() -> None:
    driver = Bursting()
    asked(driver, new=3)
    assert [row.count for row in driver.first_multi_step().rows] == [2]


@pytest.mark.parametrize(("strides", "tell"), [([3, 0], 3), ([0, 3, 1], 1), ([0], 0), ([9], 0)])
def test_a_burst_tells_of_its_steps_as_often_as_its_most_eager_reader_asks(strides, tell) -> None:
    driver = Bursting()
    for number, stride in enumerate(strides):
        asked(driver, str(number), stride=stride)
    plan = driver.first_multi_step()
    assert (plan.steps, plan.report_every) == (STEPS, tell)


def test_what_a_burst_has_sampled_so_far_is_passed_on_and_changes_nothing() -> None:
    driver = Bursting()
    asked(driver, "eager", stride=1)
    asked(driver, "patient", stride=0)
    step = driver.first_multi_step().step
    tokens = {0: array("i", [7, 8]).tobytes(), 1: array("i", [9]).tobytes()}
    flights = driver.core.scheduler.flights
    (reported,) = partial_tokens(flights[step], tokens)
    assert (reported.request, reported.first, reported.tokens) == ("eager", 1, tokens[0])
    driver.receive(Abort("eager"))
    assert partial_tokens(flights[step], tokens) == []


@pytest.mark.parametrize(
    "wishes",
    [
        {"score_from": 0},
        {"hidden_from": 0},
        {"sampling": {"min_new_tokens": 2}},
        {"sampling": {"logit_bias": {5: 1.0}}},
        {"sampling": {"processor": "p"}},
    ],
    ids=str,
)
def test_what_is_decided_between_steps_is_planned_step_by_step(wishes) -> None:
    driver = Bursting()
    asked(driver, **wishes)
    asked(driver, "b")
    driver.run()
    assert not any(plan.steps > 1 and len(plan.rows) > 1 for plan in driver.plans)


def test_nobody_bursts_while_somebody_waits() -> None:
    driver = Bursting(max_running=1)
    asked(driver)
    asked(driver, "b")
    assert driver.first_multi_step().steps == 1
