"""When a plan holds several decode steps, and what is planned behind one that ends early."""

from array import array

import pytest

from banyan.messages.plan import SAMPLE, StepPlan, StepResult
from banyan.messages.requests import Generate
from banyan.messages.sampling import SamplingParams
from tests.scheduler.driver import Driver, continuation, next_token

PROMPT = [3, 1, 4, 1, 5]
STEPS = 4


class Bursting(Driver):
    """Its runner ends every burst after `ran` steps."""

    def __init__(self, ran: int = STEPS, **limits) -> None:
        super().__init__(burst=STEPS, **limits)
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

    def first_burst(self) -> StepPlan:
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
            stride=stride,
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
    (row,) = driver.first_burst().rows
    assert (row.start, row.count, row.drafts) == (5, STEPS, STEPS - 1)
    plan = driver.plans[-1]
    assert plan.steps == STEPS
    assert [grant.first for grant in plan.grants] == [2], "positions 5 to 8, pages of 4"


def test_a_burst_does_not_go_past_the_end_of_a_request() -> None:
    driver = Bursting()
    asked(driver, new=3)
    assert [row.count for row in driver.first_burst().rows] == [2]


def test_a_burst_is_no_longer_than_the_pieces_that_a_reader_gets() -> None:
    driver = Bursting()
    asked(driver, stride=3)
    asked(driver, "b", stride=0)
    assert driver.first_burst().steps == 3


@pytest.mark.parametrize(
    "wishes",
    [
        {"stride": 1},
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
    assert driver.first_burst().steps == 1
