"""The border with a store that outlives the runners: late, failing and evicted pages, and answers
that must not know of them."""

from collections import Counter
from random import Random

import pytest

from banyan.engine.journal import Journal
from banyan.kv_cache import hierarchical_cache as tiers
from banyan.kv_cache.cache import WEIGHTS_BYTES
from banyan.kv_cache.hierarchical_cache import StoreTier
from banyan.kv_cache.radix_tree import CachedPages
from banyan.runner.kvstore import KVStore
from banyan.sim.replay import check
from tests.border.build import compile_grammar
from tests.border.driver import Action, play, random_actions, smallest
from tests.border.kit import FakeKit
from tests.border.laws import BorderError
from tests.border.real_kit import RealKit

ACTIONS = 250
WORLDS = 90
LIVES = 3
"""Runners, one after another, that find what the one before has stored."""
SWITCHES = 0.03
"""Share of the actions that switches of the store take the place of."""
MUST_HAPPEN = (
    "AttachStore",
    "DetachStore",
    "evicted pages",
    "failed copies",
    "failed loads",
    "failed steps",
    "loaded pages",
    "pages evicted from the store",
    "prefixes found in the store",
    "refused switches of the store",
    "retractions",
    "shared page reads",
    "stored pages",
)


def some_actions(seed: int, switches: float = SWITCHES) -> list[Action]:
    """Among them switches of the store."""
    random = Random(seed)
    actions = random_actions(random, ACTIONS)
    return [("switch" if random.random() < switches else kind, at) for kind, at in actions]


def play_lives(seed: int, lives: int = LIVES, switches: float = SWITCHES) -> Counter[str]:
    """One world after another with one store; when one fails, the fewest actions that still do."""
    seen: Counter[str] = Counter()
    kit = FakeKit({})
    for life in range(lives):
        game = play(seed, some_actions(seed * 10 + life, switches), kit=kit)
        seen += game.seen + game.runner.seen
    return seen


def test_what_comes_from_a_store_changes_no_answer_and_leaks_nothing(
    request: pytest.FixtureRequest,
) -> None:
    worlds = max(WORLDS, request.config.getoption("--border-steps") // (ACTIONS * LIVES * 4))
    seen: Counter[str] = Counter()
    missing, seed = list(MUST_HAPPEN), 0
    while seed < worlds or (missing and seed < MOST_WORLDS):
        seed += 1
        try:
            seen += play_lives(seed)
        except Exception as error:
            raise AssertionError(f"world {seed} fails: {error}") from error
        missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_recorded_world_with_a_store_replays_plan_for_plan(tmp_path, seed: int) -> None:
    kit, path, journals = FakeKit({}), str(tmp_path / "journal"), []
    play(seed, random_actions(Random(seed), ACTIONS), kit=kit)

    def record(core):
        journals.append(Journal(path, core, 8 << 20))
        return journals[0]

    game = play(seed, random_actions(Random(seed), ACTIONS), record, kit)
    journals[0].close()
    report = check(path, compile_grammar)
    assert report.ok and report.plans == game.runner.seen["steps"], str(report)


MOST_WORLDS = 200
"""Worlds after which everything has happened: what a load meets depends on the disk too."""
REAL_MUST_HAPPEN = (
    "AttachStore",
    "DetachStore",
    "failed loads",
    "failed steps",
    "fresh pages that are carried away first",
    "loaded pages",
    "prefixes found in the store",
    "retractions",
    "stored pages",
)


@pytest.mark.usefixtures("one_thread")
def test_the_real_runner_answers_from_real_files(tmp_path, request: pytest.FixtureRequest) -> None:
    worlds = max(8, request.config.getoption("--real-border-steps") // (ACTIONS * LIVES * 8))
    seen: Counter[str] = Counter()
    missing, seed = list(REAL_MUST_HAPPEN), 0
    while seed < worlds or (missing and seed < MOST_WORLDS):
        seed += 1
        kit = RealKit(stored=tmp_path / str(seed))
        for life in range(LIVES):
            try:
                game = play(seed, some_actions(seed * 10 + life), kit=kit)
            except Exception as error:
                raise AssertionError(f"world {seed}, life {life} fails: {error}") from error
            seen += game.seen + game.runner.seen
        missing = [what for what in REAL_MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"


@pytest.mark.usefixtures("one_thread")
def test_loaded_bytes_that_do_not_reach_their_page_are_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(KVStore, "put", lambda self, group, page, payload: None)
    with pytest.raises((AssertionError, BorderError)):
        for seed in range(1, 20):
            kit = RealKit(stored=tmp_path / str(seed))
            for life in range(LIVES):
                play(seed, random_actions(Random(seed * 10 + life), ACTIONS), kit=kit)


def verdict(worlds: int = 60, switches: float = 0.0) -> str:
    for seed in range(1, worlds):
        try:
            play_lives(seed, 2, switches)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_pages_stored_before_their_step_is_complete_are_noticed(monkeypatch) -> None:
    write = StoreTier._write

    def at_once(self, node):
        promised, node.promised = node.promised, 0
        write(self, node)
        node.promised = promised

    monkeypatch.setattr(StoreTier, "_write", at_once)
    monkeypatch.setattr(
        CachedPages,
        "attach",
        _then(CachedPages.attach, lambda cached, node, *_: cached._on_evict(node)),
    )
    monkeypatch.setattr(StoreTier, "on_evict", lambda self, node: self._write(node))
    assert "is stored, and it holds" in verdict()


def _then(first, second):
    def both(*args):
        first(*args)
        second(*args)

    return both


def test_pages_that_become_nodes_before_they_have_come_are_noticed(monkeypatch) -> None:
    load = StoreTier.load

    def hasty(self, *args):
        made = load(self, *args)
        if made is not None:
            for block in made.blocks:
                block.open = 0
            self.loads.advance(made, self._passed)
        return made

    monkeypatch.setattr(StoreTier, "load", hasty)
    assert verdict()


def test_tenants_that_share_keys_are_noticed(monkeypatch) -> None:
    root = tiers._root_key
    monkeypatch.setattr(tiers, "_root_key", lambda namespace: root(b""))
    assert "foreign" in verdict()


def test_pages_that_are_stored_after_they_were_released_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(StoreTier, "forget_copies", lambda self: None)
    assert "is stored, and it holds" in verdict()


def test_pages_of_other_weights_than_the_store_s_are_noticed(monkeypatch) -> None:
    root = tiers._root_key
    monkeypatch.setattr(tiers, "_root_key", lambda namespace: root(namespace[WEIGHTS_BYTES:]))
    key_of = StoreTier._key_of

    def any_weights(self, node):
        weights, self.weights = self.weights, b""
        try:
            return key_of(self, node)
        finally:
            self.weights = weights

    monkeypatch.setattr(StoreTier, "_key_of", any_weights)
    assert "foreign" in verdict()


def test_a_page_that_failed_to_come_and_is_used_is_noticed(monkeypatch) -> None:
    end = StoreTier.end
    monkeypatch.setattr(StoreTier, "end", lambda self, ids, failed: end(self, [*ids, *failed], []))
    assert "never written" in verdict()


def test_a_store_that_is_used_after_it_was_let_go_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(StoreTier, "detach", lambda self: None)
    assert "there is no store" in verdict(switches=SWITCHES)


def test_the_smallest_play_still_names_what_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(StoreTier, "end", lambda self, ids, failed: None)
    kit = FakeKit({})
    actions = random_actions(Random(3), ACTIONS)
    with pytest.raises(AssertionError):
        play(3, actions, kit=kit)
    assert len(smallest(3, actions, kit)) < len(actions)
