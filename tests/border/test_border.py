"""The step border under random traffic and faults: every answer equals the oracle's, every rule
of messages/plan.py is kept, every page comes back."""

from collections import Counter
from random import Random

import pytest

from banyan.engine.core_spec import CoreSpec
from banyan.engine.journal import Journal
from banyan.kv_cache.sizing import STATE, CacheGroup
from banyan.sim.replay import check
from tests.border import build
from tests.border.build import compile_grammar
from tests.border.driver import ORDERS, Play, play, random_actions, smallest

ACTIONS_PER_WORLD = 250
MOST = 100_000
"""Actions after which everything has happened."""
MUST_HAPPEN = (
    "rows over spans",
    "failed contents",
    "ReleaseMemory",
    "ResumeMemory",
    "StopProfile",
    "TakeWeights",
    "accepted drafts",
    "aborts",
    "bursts",
    "copied parts",
    "bursts that ended early",
    "evicted pages",
    "failed by a fault",
    "failed copies",
    "failed orders",
    "failed rows",
    "failed steps",
    "finished by length",
    "finished by stop",
    "flushes",
    "held for peers",
    "idle peer steps",
    "kept states",
    "masks after launch",
    "masked rows",
    "overlapped steps",
    "promised page reads",
    "refused: queue full",
    "refused: too long",
    "rejected drafts",
    "rejoins with output",
    "requests for hidden states",
    "jumps",
    "restored states",
    "retractions",
    "scored requests",
    "pooled requests",
    "shared page reads",
    "stops by the front",
    "tainted rows",
)


def test_random_traffic_gets_the_oracles_answers_and_leaks_nothing(
    request: pytest.FixtureRequest, record_property
) -> None:
    steps = request.config.getoption("--border-steps")
    seen: Counter[str] = Counter()
    missing, seed = list(MUST_HAPPEN), 0
    while seed * ACTIONS_PER_WORLD < steps or (missing and seed * ACTIONS_PER_WORLD < MOST):
        seed += 1
        game = play_or_explain(seed)
        seen += game.seen + game.runner.seen
        missing = [what for what in MUST_HAPPEN if not seen[what]]
    record_property("exercised", dict(seen))
    assert not missing, f"never happened in {seed} worlds: {missing}; happened: {dict(seen)}"


@pytest.mark.parametrize("seed", [243, 1131, 1465, 2350, 2940, 3596, 4060])
def test_worlds_where_rare_faults_meet_answer_as_well(seed: int) -> None:
    assert play_or_explain(seed, orders=0).runner.is_quiet


@pytest.mark.parametrize("seed", range(1, 13))
def test_a_recorded_world_replays_plan_for_plan(tmp_path, seed: int) -> None:
    path, journals = str(tmp_path / "journal"), []

    def record(core: CoreSpec) -> Journal:
        journals.append(Journal(path, core, 8 << 20))
        return journals[0]

    game = play(seed, random_actions(Random(seed), ACTIONS_PER_WORLD), record)
    journals[0].close()
    report = check(path, compile_grammar)
    assert report.ok, str(report)
    assert report.plans == game.runner.seen["steps"]


def play_or_explain(seed: int, orders: float = ORDERS) -> Play:
    """Play world `seed`; when it fails, fail with the fewest actions that still do."""
    actions = random_actions(Random(seed), ACTIONS_PER_WORLD, orders)
    try:
        return play(seed, actions)
    except Exception as error:
        few = smallest(seed, actions)
        raise AssertionError(
            f"world {seed} fails: {error}\nsmallest: play({seed}, {few})"
        ) from error


def test_models_of_states_alone_get_the_oracles_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(random: Random, kind: str, scale: int) -> list[CacheGroup]:
        return [CacheGroup(STATE, random.choice((4, 8)), random.choice((8, 16)))]

    monkeypatch.setattr(build, "_groups", groups)
    seen: Counter[str] = Counter()
    for seed in range(1, 31):
        seen += play(seed, random_actions(Random(seed), ACTIONS_PER_WORLD)).runner.seen
    assert seen["kept states"] and seen["restored states"]
