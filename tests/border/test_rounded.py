"""The border kit over attention that computes on rounded numbers: products of integers decide which
codes are read, and what is read is rounded to bf16, in which the codes are whole.

Heads are narrow, because the wider they are the fewer bits their queries keep: with 128 numbers the
position that this model asks for would not be the nearest one any more.
"""

from collections import Counter
from random import Random

import pytest
import torch

from banyan.ops.bind import open_toolkit
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.paged_attention import CACHE_TYPES, PagedAttention, rounds_here
from banyan.platform.cpu import CpuPlatform
from tests.border.device_kit import DTYPE, DeviceKit
from tests.border.driver import play, random_actions, smallest

pytestmark = pytest.mark.usefixtures("one_thread")
SHARE, ACTIONS_PER_WORLD = 20, 100
"""Of the steps that the runner plays with attention that rounds nothing."""
MOST = 2000
"""Steps within which all of this happens."""
MUST_HAPPEN = (
    *("aborts", "accepted drafts", "checked writes", "copied parts", "copies after"),
    *("failed by a fault", "finished by length", "masked rows", "rejected drafts"),
    *("requests for hidden states", "retractions", "scored requests", "shared page reads"),
)


@pytest.fixture
def kit() -> DeviceKit:
    toolkit = open_toolkit("cpu", 1, {})
    if not isinstance(toolkit, Library) or not rounds_here(toolkit, CACHE_TYPES[DTYPE], 16):
        pytest.skip("no attention that rounds here")
    platform = CpuPlatform()
    return DeviceKit(platform, platform.open(0, 1), torch.float32, ((),), (16,))


def test_attention_that_rounds_gives_the_oracles_answers(request, kit, monkeypatch) -> None:
    steps = request.config.getoption("--real-border-steps") // SHARE
    attend, rounded = PagedAttention.paged_attention, Counter[bool]()

    def counted(self: PagedAttention, *given, **named) -> torch.Tensor:
        rounded[self.rounds] += 1
        return attend(self, *given, **named)

    monkeypatch.setattr(PagedAttention, "paged_attention", counted)
    seen: Counter[str] = Counter()
    missing, seed = list(MUST_HAPPEN), 0
    while seen["steps"] < steps or (missing and seen["steps"] < MOST):
        seed += 1
        actions = random_actions(Random(seed), ACTIONS_PER_WORLD)
        try:
            game = play(seed, actions, kit=kit)
        except Exception as error:
            few = smallest(seed, actions, kit)
            raise AssertionError(f"world {seed} fails: {error}\nsmallest: {few}") from error
        seen += game.seen + game.runner.seen
        missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"
    assert rounded[True] > steps and not rounded[False]
