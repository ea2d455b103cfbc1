"""What is drawn with drafts has the distribution of the model, whatever is drafted."""

from collections import Counter

import numpy as np
import pytest
import torch

from banyan.messages.plan import SAMPLE, Join, PageGrant, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import FULL
from banyan.ops.bind import bind
from banyan.ops.sampling import support
from banyan.runner.batch import Batch
from banyan.runner.kvstore import GroupLayout
from banyan.runner.sampler import Sampler
from banyan.runner.slots import SlotTable
from banyan.runner.speculative.drafting import Drafting, TargetHiddenStates, count_accepted

VOCAB, SLOTS = 6, 64
CPU = torch.device("cpu")
LOGITS = np.random.default_rng(4).standard_normal((VOCAB, VOCAB)).astype(np.float32) * 1.5
"""By token: those behind it."""
ASKED = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01}


class Obstinate:
    """Drafts the same two tokens whatever happens."""

    def join(self, slot, tokens, namespace): ...
    def leave(self, slot): ...
    def extend(self, slot, first, tokens): ...
    def propose(self, rows, counts):
        return [[2, 5][:count] for count in counts]


def drawn(drafts: int, rounds: int) -> list[tuple[int, ...]]:
    """Three tokens behind token 1, for each of many seeds."""
    table = SlotTable(SLOTS, 16, VOCAB, (GroupLayout(FULL, 0, 16, SLOTS + 1),), CPU, True)
    sampler = Sampler(table, VOCAB, bind("cpu", CPU, torch.float32, frozenset(), 16))
    drafting, found = Drafting(Obstinate(), table, TargetHiddenStates()), list[tuple[int, ...]]()
    for turn in range(rounds):
        slots = range(1, SLOTS + 1)
        prompt = np.array([1], np.int32).tobytes()
        asked = [
            SamplingParams(max_new_tokens=9, seed=turn * SLOTS + slot, **ASKED) for slot in slots
        ]
        joins = [Join(slot, prompt, 1, mine) for slot, mine in zip(slots, asked, strict=True)]
        table.leave(list(slots))
        table.join(joins)
        table.grant([PageGrant(slot, 0, 0, [slot]) for slot in slots])
        drafting.enter(StepPlan(step=turn, leaves=list(slots) if turn else [], joins=joins))
        while short := [slot for slot in slots if table.known[slot] < 4]:
            rows = [_row(table, slot, drafts) for slot in short]
            batch = Batch.of(list(enumerate(rows)))
            before = table.tokens[batch.to_slots, batch.to_positions - 1].numpy()
            logits = torch.from_numpy(LOGITS[before])
            sampled = sampler.sample(logits, batch.to_slots, batch.to_positions, {})
            drafting.draft(batch, drafting.verify(batch, sampled.tokens), len(rows))
        found += [tuple(table.tokens[slot, 1:4].tolist()) for slot in slots]
    return found


def _row(table: SlotTable, slot: int, drafts: int) -> Row:
    start = table.known[slot] - 1
    many = drafts if start else 0  # the row of the prompt brings none
    return table.prepare(Row(slot, start, 1 + many, drafts=many, want=SAMPLE, propose=drafts), True)


def test_chains_of_drafts_leave_the_distribution_as_it_is() -> None:
    found = drawn(2, 60)
    chances = np.stack([support(row, 0.8, -1, 0.95, 0.01) for row in LOGITS]).astype(np.float64)
    chances /= chances.sum(1, keepdims=True)
    counts, square, cells = Counter(found), 0.0, 0
    for first in range(VOCAB):
        for second in range(VOCAB):
            for third in range(VOCAB):
                chance = chances[1, first] * chances[first, second] * chances[second, third]
                expected = chance * len(found)
                if not chance:
                    assert not counts[first, second, third]
                elif expected >= 5:
                    cells += 1
                    square += (counts[first, second, third] - expected) ** 2 / expected
    assert cells > 30
    assert square < cells + 4 * (2 * cells) ** 0.5  # four deviations of a chi-square of so many


def test_each_seed_draws_what_it_draws_without_drafts() -> None:
    assert drawn(2, 8) == drawn(1, 8) == drawn(0, 8)


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [
        ([], [5], 1),
        ([5], [5, 6], 2),
        ([5], [4, 6], 1),
        ([5, 6, 7], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 9, 7, 8], 2),
        ([5, 6, 7], [9, 6, 7, 8], 1),
    ],
)
def test_what_stands_ends_with_the_first_token_that_no_draft_foresaw(drafts, sampled, count):
    assert count_accepted(drafts, sampled) == count
