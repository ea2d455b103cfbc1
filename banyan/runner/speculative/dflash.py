"""DFLASH: a block drafter. One pass predicts all drafts at once.

The draft model reads the newest token and one mask token for each draft; these attend to each
other. Its keys and values are made from auxiliary hidden states of the target. The entries of a
position depend on that position alone and are stored next to the target's pages, so a cached
prefix serves both. After verification, the positions of a block are written again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.batch import Batch
from banyan.runner.draft_trees import Mutual
from banyan.runner.speculative import Guess
from banyan.runner.speculative.draft_runner import DraftRunner, in_steps

_MOST_HELD = 32
"""States that may be held for a request without drafts before the model reads them."""


@dataclass
class _Progress:
    """
    Attributes:
        read: the model has read the states before this position.
        held: [n, width], the states from there on.
    """

    read: int
    held: Tensor


class BlockDrafter:
    """Satisfies `Drafter`."""

    def __init__(self, draft_runner: DraftRunner) -> None:
        assert draft_runner.reader is not None and draft_runner.take_in is not None
        self._draft = draft_runner
        self._reader, self._take_in = draft_runner.reader, draft_runner.take_in
        self._table = draft_runner.table
        self._progress: dict[int, _Progress] = {}
        """By slot, after its first row; everything before that row has been read."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self._progress.pop(slot, None)

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Drop states that given tokens replace."""
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
            # The logits at a mask predict the token at that position itself, not the next one.
            batch = replace(batch, to_positions=batch.to_positions - 1)
            self._draft.forward.run(batch)
            self._draft.sample(batch)
        drafts = [
            self._table.tokens[row.slot, known[row.slot] : known[row.slot] + count]
            for row, count in zip(rows, counts, strict=True)
        ]
        # sync: the scheduler needs them
        return [found.tolist() for found in self._draft.fetch(drafts)()]

    def flush(self) -> None:
        """Everything is in the pages, which the engine owns."""

    def _enter_masks(self, blocks: Sequence[Row]) -> None:
        if not blocks:
            return
        places = [(row.slot, row.start + at) for row in blocks for at in range(1, row.count)]
        entries = [[slot, position, self._draft.mask_token] for slot, position in places]
        device = self._table.tokens.device
        self._table.enter(*torch.tensor(entries, device=device).unbind(1))

    def _read(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Read the target's states of the accepted tokens of `rows`."""
        slots = [row.slot for row in rows]
        ends = [
            self._table.known[row.slot] - 1 if row.want & SAMPLE else row.start + row.count
            for row in rows
        ]
        lengths = [end - row.start for row, end in zip(rows, ends, strict=True)]
        states = self._take_in(self._draft.target_hidden.hidden(slots, lengths)).split(lengths)
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
        """Progress of the row's slot, with the states of the step's positions appended."""
        progress = self._progress.setdefault(row.slot, _Progress(row.start, states[:0]))
        ahead = row.start - progress.read  # held states before the row
        assert ahead >= 0, f"the row starts at {row.start}, {progress.read} positions are read"
        progress.held = torch.cat([progress.held[:ahead], states])
        return progress


def open_block(
    speculative: SpeculativeConfig, open_draft_runner: Callable[[], DraftRunner]
) -> BlockDrafter:
    return BlockDrafter(open_draft_runner())
