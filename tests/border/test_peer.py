"""The border beside a server that computes prompts: pages that come late or not at all, rooms that
are lost, and answers that must not know of it."""

from collections import Counter
from random import Random

import pytest

from banyan.disaggregation.peer_pages import PeerTier
from banyan.engine.journal import Journal
from banyan.sim.replay import check
from tests.border.build import compile_grammar
from tests.border.driver import play, random_actions
from tests.border.kit import PeerKit

ACTIONS = 250
WORLDS = 150
MUST_HAPPEN = (
    "failed loads",
    "failed steps",
    "handoffs",
    "loaded pages",
    "lost rooms",
    "retractions",
    "shared page reads",
)


def play_worlds(worlds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(1, worlds + 1):
        try:
            game = play(seed, random_actions(Random(seed), ACTIONS), kit=PeerKit())
        except Exception as error:
            raise AssertionError(f"world {seed} fails: {error}") from error
        seen += game.seen + game.runner.seen
    return seen


def test_what_another_server_hands_over_changes_no_answer_and_leaks_nothing(
    request: pytest.FixtureRequest,
) -> None:
    worlds = max(WORLDS, request.config.getoption("--border-steps") // (ACTIONS * 4))
    seen = play_worlds(worlds)
    missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_recorded_world_next_to_another_server_replays_plan_for_plan(tmp_path, seed: int) -> None:
    path, journals = str(tmp_path / "journal"), []

    def record(core):
        journals.append(Journal(path, core, 8 << 20))
        return journals[0]

    game = play(seed, random_actions(Random(seed), ACTIONS), record, PeerKit())
    journals[0].close()
    report = check(path, compile_grammar)
    assert report.ok and report.plans == game.runner.seen["steps"], str(report)


def test_a_page_that_failed_to_come_and_is_used_is_noticed(monkeypatch) -> None:
    end = PeerTier.end
    monkeypatch.setattr(PeerTier, "end", lambda self, ids, failed: end(self, [*ids, *failed], []))
    with pytest.raises(AssertionError, match="never written"):
        play_worlds(60)
