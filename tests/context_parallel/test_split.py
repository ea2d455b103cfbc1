"""How a step's tokens are divided among ranks: each has one owner, and none much more to do."""

import numpy as np
import pytest

from banyan.context_parallel.forward import INTERLEAVE, SPLITS, ZIGZAG, share_capacity, split_batch
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.batch import Batch

STEPS = {
    "decode": [(1, 40, 1), (2, 7, 1), (3, 0, 1), (4, 9, 1), (5, 100, 1)],
    "a prompt": [(3, 0, 64)],
    "a chunk behind a prefix": [(3, 48, 37)],
    "short prompts": [(1, 0, 3), (2, 0, 2), (3, 5, 5), (4, 0, 1)],
    "all of it": [(1, 40, 1), (2, 16, 23), (3, 0, 2), (4, 9, 1), (5, 0, 50)],
}


def batch_of(rows: list[tuple[int, int, int]]) -> Batch:
    return Batch.of([(i, Row(*row, want=SAMPLE)) for i, row in enumerate(rows)])


def tokens_of(batch: Batch) -> list[tuple[int, int]]:
    """(slot, position) of each token."""
    slots = np.repeat(batch.slots, batch.counts)
    return list(zip(slots.tolist(), batch.positions.tolist(), strict=True))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shares", [2, 3, 4])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_every_token_is_of_one_share_and_all_ranks_know_where(rows, shares, split) -> None:
    whole = batch_of(rows)
    splits = [split_batch(whole, share, shares, split) for share in range(shares)]
    gathered = [token for each in splits for token in tokens_of(each.part)]
    assert sorted(gathered) == sorted(tokens_of(whole))
    for share, own in enumerate(splits):
        part, whole_step = own.part, own.part.whole_step
        assert own.counts == [int(d.part.offsets[-1]) for d in splits]
        known = zip(whole_step.slots.tolist(), whole_step.positions.tolist(), strict=True)
        assert list(known) == gathered
        assert [gathered[at] for at in own.places] == tokens_of(whole)
        assert [gathered[at] for at in part.last] == [tokens_of(whole)[at] for at in whole.last]
        assert len(part.slots) <= whole_step.most_rows
        assert own.counts[share] <= whole_step.most_tokens == max(own.counts)
        room, room_rows = share_capacity(int(whole.offsets[-1]), len(rows), shares, split)
        assert whole_step.most_tokens <= room and whole_step.most_rows <= room_rows


def keys_read(batch: Batch) -> int:
    return int((batch.positions + 1).sum())


def test_zigzag_gives_each_share_as_many_keys_to_read_in_few_pieces() -> None:
    parts = [split_batch(batch_of([(1, 0, 96)]), share, 3, ZIGZAG).part for share in range(3)]
    assert [part.starts.tolist() for part in parts] == [[0, 80], [16, 64], [32]]
    assert [part.counts.tolist() for part in parts] == [[16, 16], [16, 16], [32]]
    assert len({keys_read(part) for part in parts}) == 1


def test_interleave_gives_token_i_to_share_i_modulo_their_number() -> None:
    parts = [split_batch(batch_of([(1, 5, 7), (2, 0, 2)]), s, 2, INTERLEAVE).part for s in range(2)]
    assert parts[0].starts.tolist() == [5, 7, 9, 11, 1]
    assert parts[1].starts.tolist() == [6, 8, 10, 0]
    assert set(parts[0].counts.tolist()) == {1}


@pytest.mark.parametrize("split", SPLITS)
def test_rows_that_decode_are_shared_out_evenly(split) -> None:
    rows = [(slot, 30 + slot, 1) for slot in range(1, 9)]
    counts = split_batch(batch_of(rows), 0, 4, split).counts
    assert counts == [2, 2, 2, 2]
