"""Drafts that branch, through the border: the real runner gives the oracle's answers, and what it
does wrong with branches is noticed."""

import logging
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from banyan.runner import draft_trees as branches
from banyan.runner import inputs, runner
from banyan.runner.draft_trees import Compaction
from banyan.runner.speculative.tree_growth import Growing
from tests.border.driver import play, random_actions
from tests.border.faults import FaultyOps
from tests.border.real_kit import RealKit

pytestmark = pytest.mark.usefixtures("one_thread")
KIT = RealKit(branches=5)
WORLDS, ACTIONS = range(1, 5), 150
TELLING = (1, 15, 35)
"""Worlds in which most of what goes wrong shows, penalties among them."""
Change = Callable[..., object]


def played(seed: int) -> Counter:
    return play(seed, random_actions(Random(seed), ACTIONS), kit=KIT).runner.seen


def test_worlds_in_which_all_drafts_branch_give_the_oracles_answers():
    seen = sum(map(played, WORLDS), Counter())
    assert seen["moved drafts"] > 20, seen


def test_trees_of_a_model_give_the_oracles_answers_and_it_foresees_them(monkeypatch):
    """It is the model that answers, once more: so it foresees less where its own pages do not hold
    what they should, and no answer shows that either."""
    kit = RealKit(branches=5, levels=4)

    def seen() -> Counter:
        worlds = (play(seed, random_actions(Random(seed), ACTIONS), kit=kit) for seed in WORLDS)
        return sum((world.runner.seen for world in worlds), Counter())

    right = seen()
    assert right["moved drafts"] > 10, right
    beside = Growing.paths.fget
    monkeypatch.setattr(  # what leads to a token is not read
        Growing, "paths", property(lambda self: [[0] * len(p[1:]) + p[-1:] for p in beside(self)])
    )
    assert seen()["accepted drafts"] < right["accepted drafts"]


def _previous(original, paths, batch):
    """A draft reads the one before it in place of the one that it follows."""
    original(paths, batch)
    for at, mine in batch.branches.items():
        first = int(batch.offsets[at])
        for line in range(first + 2, int(batch.offsets[at + 1])):
            if paths[line, 1] > 2:
                paths[line, paths[line, 1]] = line - 1 - first + mine.base


def _no_paths(original, paths, batch):
    paths[:, 1] = 0


def _no_keys(original, self, name):
    move = original(self, name)
    return (lambda k, v, *where: move(k.clone(), v, *where)) if name == "move_kv" else move


DEFECTS: dict[str, tuple[object, str, Change]] = {
    "a draft reads one that is beside it": (inputs, "enter_paths", _previous),
    "drafts stand where they lie": (inputs, "enter_paths", _no_paths),
    "a draft follows another one than it should": (
        branches,
        "paths_of",
        lambda original, parents: original([max(-1, parent - 1) for parent in parents]),
    ),
    "the keys of what stands stay behind": (FaultyOps, "__getattr__", _no_keys),
    "what stands stays where it lies": (Compaction, "move", lambda original, *a: None),
    "what stands is brought one place too far": (
        Compaction,
        "move",
        lambda original, self, slots, lies, to: original(self, slots, lies, [p + 1 for p in to]),
    ),
    "what stands is brought from one place before": (
        Compaction,
        "move",
        lambda original, self, slots, lies, to: original(self, slots, [p - 1 for p in lies], to),
    ),
    "penalties count what lies beside a draft": (runner, "histories", lambda *a: None),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    owner, name, change = DEFECTS[defect]
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *a: change(original, *a))
        assert any(map(_fails, TELLING)), f"{len(TELLING)} worlds went well although {defect}"


def _fails(seed: int) -> bool:
    try:
        played(seed)
    except Exception:
        return True
    return False
