"""How many drafts rows verify: what they bring against what they cost, learnt from results."""

from array import array
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

from banyan.messages.plan import SAMPLE, StepPlan, StepResult
from banyan.scheduler.request import DraftState
from banyan.scheduler.speculation import Speculation, StepTimes
from tests.scheduler.driver import Driver, continuation, next_token
from tests.support.flags import config_of

PROMPT = list(range(9))
MOST = 6


class DraftingDriver(Driver):
    """
    Args:
        good: share of the drafts that come true.
        seconds: of a step, by the number of its tokens.
        pass_s: what each draft takes, where a model drafts.
    """

    def __init__(
        self,
        good: float,
        seconds: Callable[[int], float] = lambda tokens: 1 + 0.1 * tokens,
        pass_s: float = 0.0,
        **more,
    ) -> None:
        self.good = good
        self.pass_s = pass_s
        self.made: list[int] = []
        """Drafts that each step makes behind a row."""
        self._seconds = seconds
        self._random = Random(1)
        self._drafts: dict[int, list[int]] = {}
        super().__init__(drafts=MOST, paid_drafts=pass_s > 0, **more)

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.leaves:
            del self.slots[slot]
        for join in plan.joins:
            self.slots[join.slot], self._drafts[join.slot] = list(array("i", join.tokens)), []
        tokens, drafts, num_tokens = [], [], 0
        for row in plan.rows:
            history, given = self.slots[row.slot], self._drafts[row.slot][: row.drafts]
            num_tokens += row.count - row.drafts + len(given)
            sampled = []
            if row.want & SAMPLE:
                for draft in [*given, None]:
                    sampled.append(next_token(history))
                    history.append(sampled[-1])
                    if draft != sampled[-1]:
                        break
                self._drafts[row.slot] = self._guess(history)[: row.propose]
            tokens.append(array("i", sampled).tobytes())
            drafts.append(array("i", self._drafts[row.slot]).tobytes())
        self.made.append(max((row.propose for row in plan.rows), default=0))
        paid = self.pass_s * self.made[-1]
        seconds = self._seconds(num_tokens) + paid
        return StepResult(
            step=plan.step, tokens=tokens, drafts=drafts, seconds=seconds, draft_seconds=paid
        )

    def _guess(self, history: list[int]) -> list[int]:
        right = continuation(history, MOST)
        return [token if self._random.random() < self.good else token + 1 for token in right]

    def drafts_of_rows(self) -> list[int]:
        """Of the rows that begin at a request's newest token."""
        return [row.drafts for plan in self.plans for row in plan.rows if row.start >= len(PROMPT)]


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_the_same_whatever_is_drafted(depth):
    for good in (0.0, 0.5, 1.0):
        driver = DraftingDriver(good, depth=depth)
        for name in "abc":
            driver.submit(name, [*PROMPT, ord(name)], 40)
        driver.run()
        for name in "abc":
            assert driver.outputs[name] == continuation([*PROMPT, ord(name)], 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_come_true_are_verified_in_numbers(depth):
    driver = DraftingDriver(1.0, depth=depth)
    driver.submit("a", PROMPT, 200)
    driver.run()
    assert max(driver.drafts_of_rows()) == MOST
    assert len(driver.plans) < 60
    drafts = driver.ends["a"].drafts
    assert drafts.correct == drafts.proposed > 100
    assert drafts.steps + drafts.correct == 199
    assert sum(drafts.histogram) == drafts.steps


def test_drafts_that_never_come_true_are_soon_verified_no_more():
    driver = DraftingDriver(0.0)
    driver.submit("a", PROMPT, 200)
    driver.run()
    verified = driver.drafts_of_rows()
    assert 0 < sum(verified) < 40
    assert not any(verified[40:])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_whose_drafts_are_wrong_gets_the_drafts_of_one_row_a_step(depth):
    """What tells them runs between two steps, and a step of eight rows waits for all of it."""
    driver = DraftingDriver(0.0, depth=depth, max_running=8)
    for i in range(8):
        driver.submit(str(i), [*PROMPT, i], 200)
    driver.run()
    asked = [sum(row.propose > 0 for row in plan.rows) for plan in driver.plans[60:200]]
    assert 0.5 < sum(asked) / len(asked) < 2
    assert all(driver.outputs[str(i)] == continuation([*PROMPT, i], 200) for i in range(8))


def test_drafts_are_verified_again_once_they_would_have_come_true():
    driver = DraftingDriver(0.0)
    driver.submit("a", PROMPT, 200)
    while len(driver.outputs.get("a", [])) < 100:
        driver.step()
    before = len(driver.plans)
    assert not any(row.drafts for plan in driver.plans[60:] for row in plan.rows)
    driver.good = 1.0
    driver.run()
    assert len(driver.plans) - before < 60


def test_nothing_is_verified_where_each_token_costs_a_whole_step():
    driver = DraftingDriver(0.9, seconds=lambda tokens: float(tokens))
    driver.submit("a", PROMPT, 200)
    driver.run()
    assert not any(driver.drafts_of_rows()[40:])


def test_many_requests_verify_fewer_drafts_each_than_one_alone():
    def most(requests: int) -> float:
        driver = DraftingDriver(0.7, max_running=16)
        for i in range(requests):
            driver.submit(str(i), [*PROMPT, i], 100)
        driver.run()
        verified = driver.drafts_of_rows()
        return sum(verified) / len(verified)

    assert most(1) > 1.5 * most(16) > 0


def test_a_step_has_room_for_so_many_drafts():
    driver = DraftingDriver(1.0, draft_budget=8, max_running=4)
    for i in range(4):
        driver.submit(str(i), [*PROMPT, i], 60)
    driver.run()
    assert max(sum(row.drafts for row in plan.rows) for plan in driver.plans) == 8


def test_drafts_take_no_pages_from_other_requests():
    def retractions(good: float) -> int:
        driver = DraftingDriver(good, pages=13, page_tokens=4, max_running=2)
        for i in range(2):
            driver.submit(str(i), [*PROMPT, i], 14)
        driver.run()
        return driver.core.scheduler.counters.retractions

    assert retractions(1.0) == retractions(0.0) == 0


def test_drafts_that_are_paid_are_made_as_long_as_they_are_worth_it():
    cheap, dear = DraftingDriver(0.9, pass_s=0.1), DraftingDriver(0.9, pass_s=2.0)
    for driver in (cheap, dear):
        driver.submit("a", PROMPT, 380)
        driver.run()
        assert driver.outputs["a"] == continuation(PROMPT, 380)
    assert sum(cheap.made[20:60]) > 2 * 40 and len(cheap.plans) < 180
    late = dear.made[20:]
    assert max(late) == 1 and 0 < sum(late) * dear.pass_s < 0.04 * len(late)
    assert max(dear.drafts_of_rows()) <= 1


def test_drafts_may_be_made_whatever_they_cost():
    config = config_of("--speculative-algorithm", "NGRAM", "--disable-adaptive-drafts")
    for is_fixed in (False, config.speculative.is_fixed):
        driver = DraftingDriver(0.0, pass_s=2.0, fixed_drafts=is_fixed)
        driver.submit("a", PROMPT, 100)
        driver.run()
        assert driver.outputs["a"] == continuation(PROMPT, 100)
        assert (min(driver.made[2:50]) == MOST) is is_fixed
    assert is_fixed


def test_drafts_that_are_paid_are_made_again_once_they_come_true():
    driver = DraftingDriver(0.0, pass_s=0.1, pages=64, page_tokens=16, max_request_tokens=1000)
    driver.submit("a", PROMPT, 900)
    while len(driver.outputs.get("a", [])) < 300:
        driver.step()
    before = len(driver.plans)
    assert sum(driver.made[100:]) <= (before - 100) / 16 + 4
    driver.good = 1.0
    driver.run()
    assert len(driver.plans) - before < 420


@pytest.mark.parametrize(
    ("levels", "parents", "made"),
    [(2, [-1] * MOST, MOST), (2, [-1, -1, 0, 0, 1, 1], 2), (2, [-1, -1], 3), (0, [], 1)],
)
def test_a_pass_makes_a_level_of_a_tree_and_its_first_draft_pays_for_it(levels, parents, made):
    """A pass takes 0.4 steps, a token next to nothing, and seven of ten drafts come true."""
    speculation = Speculation(MOST, is_paid=True, levels=levels)
    drafting = 0.4 * (levels or MOST)
    flight = SimpleNamespace(propose=MOST, follows_proposal=True)
    for tokens in [1, 7] * 20:
        seconds = 1 + 0.01 * tokens + drafting
        result = SimpleNamespace(seconds=seconds, draft_seconds=drafting)
        speculation.learn_times(tokens, [flight], result)
    request = SimpleNamespace(drafting=DraftState(parents=parents, acceptance=0.7, proposed=MOST))
    assert speculation.drafts_to_make(request, 1) == made


@pytest.mark.parametrize(
    ("pass_s", "per_token", "made", "verified"),
    [(0.5, 0.01, MOST, MOST), (3.0, 0.01, 0, MOST), (0.1, 0.4, MOST, 2), (0.1, 3.0, 0, 0)],
)
def test_a_block_is_made_as_a_whole_where_its_pass_pays(pass_s, per_token, made, verified):
    """Seven of ten drafts come true."""
    speculation = Speculation(MOST, is_paid=True, levels=1, in_blocks=True)
    flight = SimpleNamespace(propose=MOST, follows_proposal=True)
    for tokens in [1, 7] * 20:
        seconds = 1 + per_token * tokens + pass_s
        speculation.learn_times(
            tokens, [flight], SimpleNamespace(seconds=seconds, draft_seconds=pass_s)
        )
    request = SimpleNamespace(drafting=DraftState(parents=[], acceptance=0.7, proposed=MOST))
    assert speculation.drafts_to_verify(request, 1) == verified
    speculation.drafts_to_make(request, 1)  # the first look of all
    request.drafting.probes_left = 0
    assert speculation.drafts_to_make(request, 1) == made


@pytest.mark.parametrize("more", [0, 1])
def test_a_row_has_pages_for_the_drafts_that_are_made_behind_it(more):
    """And for the last one itself, where it is read as well."""
    levels = {"draft_levels": 1, "block_drafts": True} if more else {}
    driver = DraftingDriver(1.0, pass_s=0.1, page_tokens=4, max_running=2, **levels)
    driver.submit("a", PROMPT, 60)
    driver.run()
    granted, made = 0, 0
    for plan in driver.plans:
        granted = max([granted, *(grant.first + len(grant.pages) for grant in plan.grants)])
        for row in plan.rows:
            assert granted * 4 >= row.start + row.count + row.propose + more * bool(row.propose)
            made = max(made, row.propose)
    assert made == MOST
    assert granted * 4 <= len(PROMPT) + 60 + 3  # and none beyond the end


def test_a_line_over_step_times_is_found():
    times = StepTimes()
    for tokens in (1, 4, 2, 7, 1, 3) * 20:
        times.learn(tokens, 0.010 + 0.002 * tokens)
    assert times.per_token == pytest.approx(0.002, rel=0.05)
    assert times.of(10) == pytest.approx(0.030, rel=0.05)


def test_one_slow_step_does_not_change_the_line_much():
    times = StepTimes()
    for tokens in (1, 4) * 50:
        times.learn(tokens, 0.010 + 0.002 * tokens)
    times.learn(4, 10.0)
    assert times.per_token < 0.004
