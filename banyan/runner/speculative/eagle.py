"""NEXTN (MTP), EAGLE, EAGLE3: draft layers that read the target's hidden states.

With each token the layer reads the target's hidden state of the token before. Its keys and values
are stored next to the target's pages, so a cached prefix serves both; the state that the first
token after the prefix needs is kept in the page before it. After verification, entries that were
written from the layer's own states are written again from the target's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.speculative import Guess
from banyan.runner.speculative.draft_runner import DraftRunner, in_steps
from banyan.runner.speculative.tree_growth import Grower, open_grower

_MOST_HELD = 32
"""States that may be held for a request without drafts before the layer reads them."""


@dataclass
class _Progress:
    """
    Attributes:
        read: the layer has read the tokens before this position.
        held: [n, width], the target's states from position read − 1 on.
    """

    read: int
    held: Tensor


class HiddenDrafter:
    """Satisfies `Drafter`.

    Args:
        grower: grows draft trees; None = drafts are chains.
    """

    def __init__(self, draft_runner: DraftRunner, grower: Grower | None = None) -> None:
        assert draft_runner.page_ends is not None and draft_runner.take_in is not None
        self._draft = draft_runner
        self._page_ends, self._take_in = draft_runner.page_ends, draft_runner.take_in
        self._grower = grower
        self._known = draft_runner.table.known
        self._progress: dict[int, _Progress] = {}
        """By slot, after its first row; everything before that row has been read."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self._progress.pop(slot, None)

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Drop states that the new tokens replace. The token at `first` was reported before, so it
        does not change."""
        progress = self._progress.get(slot)
        if progress is not None and progress.read > first + 1:
            progress.read, progress.held = first + 1, progress.held[:0]

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Guess]:
        if not rows:
            return []
        due, states = self._take_states(rows, counts)
        if self._grower is not None:
            return self._grower.grow_after(self._grower.read(due, states), rows, counts)
        following = self._read(due, states)
        for done in range(1, max(counts, default=0)):
            again = [
                Row(row.slot, self._known[row.slot] + done - 1, 1, want=SAMPLE)
                for row, count in zip(rows, counts, strict=True)
                if count > done
            ]
            carried = torch.stack([following[row.slot] for row in again])
            following = self._read(again, [carried])
        tokens = self._draft.table.tokens
        firsts = [self._known[row.slot] for row in rows]
        drafts = [
            tokens[row.slot, first : first + count]
            for row, first, count in zip(rows, firsts, counts, strict=True)
        ]
        # sync: the scheduler needs them
        return [found.tolist() for found in self._draft.fetch(drafts)()]

    def flush(self) -> None:
        """Everything is in the pages, which the engine owns."""

    def _take_states(
        self, rows: Sequence[Row], counts: Sequence[int]
    ) -> tuple[list[Row], list[Tensor]]:
        """The rows that the layer reads after a step of `rows`, and their states, [count, width]
        each."""
        slots = [row.slot for row in rows]
        ends = [self._end_of(row) for row in rows]
        lengths = [end - row.start for row, end in zip(rows, ends, strict=True)]
        states = self._take_in(self._draft.target_hidden.hidden(slots, lengths))
        self._keep(rows, ends, states)
        due: list[Row] = []
        taken: list[Tensor] = []
        for row, count, end, mine in zip(rows, counts, ends, states.split(lengths), strict=True):
            progress = self._progress_of(row, mine)
            first, last = progress.read, end if count else end - 1
            is_prompt = row.count - row.drafts > 1 or not row.want & SAMPLE
            may_wait = self._draft.may_lag and not is_prompt and len(progress.held) <= _MOST_HELD
            if last < first or (not count and may_wait):
                continue
            due.append(Row(row.slot, first, last + 1 - first, want=SAMPLE if count else 0))
            taken.append(progress.held[: last + 1 - first])
            progress.read, progress.held = last + 1, progress.held[last + 1 - first :]
        return due, taken

    def _end_of(self, row: Row) -> int:
        """Position after the row's last accepted token that has run."""
        return self._known[row.slot] - 1 if row.want & SAMPLE else row.start + row.count

    def _keep(self, rows: Sequence[Row], ends: Sequence[int], states: Tensor) -> None:
        """Store the state of each full page's last token, before any row needs one."""
        size, first = self._page_ends.page_size, 0
        slots: list[int] = []
        positions: list[int] = []
        where: list[int] = []
        for row, end in zip(rows, ends, strict=True):
            lasts = range(row.start // size * size + size - 1, end, size)
            slots += [row.slot] * len(lasts)
            positions += lasts
            where += [first + last - row.start for last in lasts]
            first += end - row.start
        self._page_ends.keep(slots, positions, states[torch.tensor(where, dtype=torch.long)])

    def _progress_of(self, row: Row, states: Tensor) -> _Progress:
        """Progress of the row's slot, with the states of the step's positions appended."""
        progress = self._progress.get(row.slot)
        if progress is None:
            before = states[:0]
            if row.start:
                before = self._page_ends.of([row.slot], [row.start - 1])
            progress = _Progress(max(row.start, 1), before)
            self._progress[row.slot] = progress
        ahead = row.start - (progress.read - 1)  # held states before the row
        assert ahead >= 0, f"the row starts at {row.start}, {progress.read} positions are read"
        progress.held = torch.cat([progress.held[:ahead], states])
        return progress

    def _read(self, rows: Sequence[Row], states: Sequence[Tensor]) -> dict[int, Tensor]:
        """Run rows through the layer; returns by slot its hidden state of the last token, for rows
        that sample."""
        following: dict[int, Tensor] = {}
        carried = torch.cat(list(states)) if states else torch.empty(0)
        at = 0
        for some in in_steps(rows, self._draft.max_tokens):
            tokens = sum(row.count for row in some)
            batch = self._draft.run(some, carried[at : at + tokens])
            at += tokens
            if batch.wanted & SAMPLE:
                made = self._draft.forward.hidden(batch.last)
                following |= dict(zip(batch.to_slots.tolist(), made, strict=True))
        return following


def open_hidden(
    speculative: SpeculativeConfig, open_draft_runner: Callable[[], DraftRunner]
) -> HiddenDrafter:
    draft_runner = open_draft_runner()
    return HiddenDrafter(draft_runner, open_grower(speculative, draft_runner))
