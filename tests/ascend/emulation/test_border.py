"""The border kit on the emulated NPU: pages, slots and steps are the device's, and every token,
score and hidden state is what the tokens before it make it."""

import logging
from collections import Counter
from random import Random

import pytest

from banyan.ascend.ops import paged_attention
from banyan.ascend.platform import NpuPlatform, _LengthGraph
from tests.border.device_kit import DeviceKit
from tests.border.driver import Play, play, random_actions, smallest

SHARE, ACTIONS_PER_WORLD = 50, 100
"""Of the steps that the runner plays on the host."""
LEAST, MOST = 400, 2000
"""Steps that are played anyway, and those within which all of this happens."""
MUST_HAPPEN = (
    *("aborts", "accepted drafts", "checked writes", "copied parts", "copies after"),
    *("failed by a fault", "finished by length", "late masks", "masked rows", "refused joins"),
    *("rejected drafts", "requests for hidden states", "scored requests", "trespassing rows"),
    "refused orders",
)


@pytest.fixture
def kit(npu, monkeypatch) -> DeviceKit:
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    monkeypatch.setenv("BANYAN_NPU_CHECKS", "1")
    platform = NpuPlatform()
    return DeviceKit(platform, platform.open(0, 1))


def test_the_runner_on_a_device_gives_the_oracles_answers(request, kit) -> None:
    steps = max(LEAST, request.config.getoption("--real-border-steps") // SHARE)
    seen: Counter[str] = Counter()
    missing, seed = list(MUST_HAPPEN), 0
    while seen["steps"] < steps or (missing and seen["steps"] < MOST):
        seed += 1
        game = play_or_explain(seed, kit)
        seen += game.seen + game.runner.seen
        missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"
    assert kit.captured and kit.eager


def _graphs_get_the_lengths_before(patch: pytest.MonkeyPatch) -> None:
    replay = _LengthGraph.replay
    patch.setattr(_LengthGraph, "replay", lambda s, at=(): replay(s, [max(1, n - 1) for n in at]))


def _rows_forget_their_last_key(patch: pytest.MonkeyPatch) -> None:
    lengths_of = paged_attention.lengths_of
    patch.setattr(
        paged_attention, "lengths_of", lambda *at: [max(1, n - 1) for n in lengths_of(*at)]
    )


DEFECTS = (_graphs_get_the_lengths_before, _rows_forget_their_last_key)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_device_that_reads_too_few_keys_is_noticed(kit, monkeypatch, defect) -> None:
    logging.disable(logging.CRITICAL)
    defect(monkeypatch)
    with pytest.raises(Exception, match=r".+"):
        for seed in range(1, 20):
            play(seed, random_actions(Random(seed), ACTIONS_PER_WORLD), kit=kit)


def play_or_explain(seed: int, kit: DeviceKit) -> Play:
    """Play world `seed`; when it fails, fail with the fewest actions that still do."""
    actions = random_actions(Random(seed), ACTIONS_PER_WORLD)
    try:
        return play(seed, actions, kit=kit)
    except Exception as error:
        few = smallest(seed, actions, kit)
        raise AssertionError(f"world {seed} fails: {error}\nplay({seed}, {few})") from error
