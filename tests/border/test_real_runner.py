"""The real ModelRunner under the traffic that the fake runner gets, in the worlds that it says it
can live in: every token, score and vector is what the tokens before it make it, from pages that
hold poison wherever nobody has written."""

from collections import Counter
from dataclasses import asdict
from random import Random

import pytest

from banyan.messages.plan import Join, PageGrant, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from tests.border.driver import Play, play, random_actions, smallest
from tests.border.fake_runner import ABILITIES
from tests.border.real_kit import REAL, plain_runner

pytestmark = pytest.mark.usefixtures("one_thread")
ACTIONS_PER_WORLD = 250
MOST = 14_000
"""Steps after which everything has happened."""
MUST_HAPPEN = (
    "pieces",
    "ReleaseMemory",
    "ResumeMemory",
    "StopProfile",
    "TakeWeights",
    "aborts",
    "bursts",
    "accepted drafts",
    "checked writes",
    "copied parts",
    "copies after",
    "copies before",
    "evicted pages",
    "failed by a fault",
    "failed copies",
    "failed orders",
    "failed masks",
    "failed steps",
    "failed without a choice",
    "finished by length",
    "finished by stop",
    "flushes",
    "fresh pages",
    "jumps",
    "kept states",
    "late masks",
    "late results",
    "masked rows",
    "overlapped steps",
    "pooled requests",
    "promised page reads",
    "refused: queue full",
    "rejected drafts",
    "refused: too long",
    "refused joins",
    "rejoins with output",
    "requests for hidden states",
    "restored states",
    "retractions",
    "rows of no numbers",
    "scored requests",
    "shared page reads",
    "stops by the front",
    "trespassing rows",
)


def test_the_real_runner_gives_the_oracles_answers(
    request: pytest.FixtureRequest, record_property
) -> None:
    steps = request.config.getoption("--real-border-steps")
    seen: Counter[str] = Counter()
    missing, seed = list(MUST_HAPPEN), 0
    while seen["steps"] < steps or (missing and seen["steps"] < MOST):
        seed += 1
        game = play_or_explain(seed)
        seen += game.seen + game.runner.seen
        missing = [what for what in MUST_HAPPEN if not seen[what]]
    record_property("exercised", dict(seen))
    assert not missing, f"never happened in {seen['steps']} steps: {missing}; happened: {seen}"


def test_the_real_runner_declares_nothing_that_the_fake_one_lacks() -> None:
    mine, all_there_is = asdict(plain_runner().abilities), asdict(ABILITIES)
    assert set(mine.pop("groups")) <= set(all_there_is.pop("groups"))
    assert all(all_there_is[ability] for ability, is_there in mine.items() if is_there)


@pytest.mark.parametrize("ability", ["drafts", "adapters"])
def test_what_is_not_declared_fails_its_row_and_is_not_ignored(ability: str) -> None:
    runner = plain_runner()
    assert not getattr(runner.abilities, ability)
    join = Join(
        slot=1,
        tokens=b"\1\0\0\0" * 4,
        prompt_len=4,
        sampling=SamplingParams(max_new_tokens=4),
        adapter=int(ability == "adapters"),
    )
    row = Row(1, 0, 4, drafts=int(ability == "drafts"))
    plan = StepPlan(step=1, joins=[join], grants=[PageGrant(1, 0, 0, [1])], rows=[row])
    result = runner.launch(plan).result()
    assert [failure.row for failure in result.failed] == [0]
    assert ability.removesuffix("s") in result.failed[0].text


def play_or_explain(seed: int) -> Play:
    """Play world `seed`; when it fails, fail with the fewest actions that still do."""
    actions = random_actions(Random(seed), ACTIONS_PER_WORLD)
    try:
        return play(seed, actions, kit=REAL)
    except Exception as error:
        few = smallest(seed, actions, REAL)
        raise AssertionError(
            f"world {seed} fails: {error}\nsmallest: play({seed}, {few}, kit=REAL)"
        ) from error
