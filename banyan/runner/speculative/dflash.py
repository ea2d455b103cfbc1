"""DFLASH: drafts of a model that reads the newest token and a mask for each draft, all of which
read each other, and tells all of them in one pass.

What it knows of a request are keys and values made of what came to some of the target's layers. A
position's depend on that position alone and lie in the pages beside the target's, so that a cached
prefix is there for both. What a block has written is written again once it is known what stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.batch import Batch
from banyan.runner.draft_trees import Mutual
from banyan.runner.speculative.base import DraftRunner, Guess
from banyan.runner.speculative.draft_runner import in_steps, sample_pass

_MOST_HELD = 32
"""States that a request for which nothing is drafted may have before the model reads them."""


@dataclass
class _Progress:
    """
    Attributes:
        read: the model has read the states before this position.
        held: [n, width], those from there on.
    """

    read: int
    held: Tensor


class BlockDrafter:
    """Satisfies `speculative.base.Drafter`."""

    def __init__(self, draft_runner: DraftRunner) -> None:
        assert draft_runner.reader is not None and draft_runner.take_in is not None
        self._draft, self._reader, self._take_in = (
            draft_runner,
            draft_runner.reader,
            draft_runner.take_in,
        )
        self._table = draft_runner.table
        self._progress: dict[int, _Progress] = {}
        """By slot. None of one that has joined and not run: before its first row all is read."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self._progress.pop(slot, None)

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Tokens that a row brings take the place of others."""
        progress = self._progress.get(slot)
        if progress is not None and progress.read > first:
            progress.read, progress.held = first, progress.held[:0]

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Guess]:
        if not rows:
            return []
        self._read(rows, counts)
        asked = [(row.slot, count) for row, count in zip(rows, counts, strict=True) if count]
        known = self._table.known
        blocks = [
            Row(slot, known[slot] - 1, count + 1, count - 1, want=SAMPLE) for slot, count in asked
        ]
        self._enter_masks(blocks)
        for some in in_steps(blocks, self._draft.max_outputs):
            mutual = {at: Mutual.of(row.start, row.count) for at, row in enumerate(some)}
            batch = Batch.of(list(enumerate(some)), mutual)
            # What is made of a mask tells the token in its own place.
            batch = replace(batch, to_positions=batch.to_positions - 1)
            self._draft.forward.run(batch)
            sample_pass(self._draft, batch)
        drafts = [
            self._table.tokens[row.slot, known[row.slot] : known[row.slot] + count]
            for row, count in zip(rows, counts, strict=True)
        ]
        # sync: they are told to the scheduler
        return [found.tolist() for found in self._draft.fetch(drafts)()]

    def flush(self) -> None:
        """Nothing is remembered beside the pages, which are the engine's."""

    def _enter_masks(self, blocks: Sequence[Row]) -> None:
        if not blocks:
            return
        places = [(row.slot, row.start + at) for row in blocks for at in range(1, row.count)]
        entries = [[slot, position, self._draft.mask] for slot, position in places]
        device = self._table.tokens.device
        self._table.enter(*torch.tensor(entries, device=device).unbind(1))

    def _read(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """What the step of `rows` told of tokens that stand."""
        slots = [row.slot for row in rows]
        ends = [
            self._table.known[row.slot] - 1 if row.want & SAMPLE else row.start + row.count
            for row in rows
        ]
        lengths = [end - row.start for row, end in zip(rows, ends, strict=True)]
        states = self._take_in(self._draft.target.hidden(slots, lengths)).split(lengths)
        due: list[Row] = []
        taken: list[Tensor] = []
        for row, count, end, mine in zip(rows, counts, ends, states, strict=True):
            progress = self._progress_of(row, mine)
            is_prompt = row.count - row.drafts > 1 or not row.want & SAMPLE
            may_wait = self._draft.may_lag and not is_prompt and len(progress.held) <= _MOST_HELD
            if len(progress.held) and (count or not may_wait):
                due.append(Row(row.slot, progress.read, end - progress.read))
                taken.append(progress.held)
                progress.read, progress.held = end, progress.held[:0]
        at = 0
        carried = torch.cat(taken) if taken else torch.empty(0)
        for some in in_steps(due, self._draft.max_tokens):
            tokens = sum(row.count for row in some)
            batch = Batch.of(list(enumerate(some)))
            self._reader.run(replace(batch, carried=carried[at : at + tokens]))
            at += tokens

    def _progress_of(self, row: Row, states: Tensor) -> _Progress:
        """What was read of the row's slot, with the states of the step's positions."""
        progress = self._progress.setdefault(row.slot, _Progress(row.start, states[:0]))
        ahead = row.start - progress.read  # states from before the row that are waited for
        assert ahead >= 0, f"the row starts at {row.start}, {progress.read} positions are read"
        progress.held = torch.cat([progress.held[:ahead], states])
        return progress


def open_block(
    speculative: SpeculativeConfig, open_draft_runner: Callable[[], DraftRunner]
) -> BlockDrafter:
    return BlockDrafter(open_draft_runner())
