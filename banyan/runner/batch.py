"""Batch: the rows of a plan that run, as host arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from operator import or_

import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import PADDING_SLOT
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.draft_trees import Branches
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class WholeStep:
    """The tokens of all context parallel shares of a step, share by share.

    Attributes:
        slots, positions: [tokens] int64.
        most_tokens, most_rows: of the largest share.
    """

    slots: np.ndarray
    positions: np.ndarray
    most_tokens: int
    most_rows: int


@dataclass(eq=False)
class Batch:
    """The rows of a plan that run, as host arrays with one entry per row.

    Not frozen, because creating a frozen class of so many fields takes twice as long in each step;
    but nothing writes to it.

    Attributes:
        wanted: the wishes (SAMPLE, SCORE, …) of all rows, or-ed.
        indices: index into StepPlan.rows.
        ends: position after the last one of each row.
        offsets: [rows + 1], first token of each row along the step's tokens.
        sampling: row of each output. A row that samples has an output for its last token, and one
            for each draft before it.
        last: token of each output, along the step's tokens.
        to_slots, to_positions: where the sampled token of each output is written.
        carried: [tokens, width], `StepInputs.previous_states`.
        whole_step: all tokens of the step, if this batch is one context parallel share of it;
            `last` then refers to them.
        branches: draft trees, by row.
    """

    rows: list[Row]
    wanted: int
    indices: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray
    sampling: np.ndarray
    last: np.ndarray
    to_slots: np.ndarray
    to_positions: np.ndarray
    carried: Tensor | None = field(default=None, kw_only=True)
    whole_step: WholeStep | None = field(default=None, kw_only=True)
    branches: Mapping[int, Branches] = field(default_factory=dict[int, Branches], kw_only=True)

    @classmethod
    def of(
        cls, rows: list[tuple[int, Row]], branches: Mapping[int, Branches] | None = None
    ) -> "Batch":
        ends = [row.start + row.count for _, row in rows]
        offsets = [0, *accumulate(row.count for _, row in rows)]
        back = [
            (at, back)
            for at, (_, row) in enumerate(rows)
            if row.want & SAMPLE
            for back in range(row.drafts, -1, -1)
        ]
        found = cls(
            [row for _, row in rows],
            reduce(or_, (row.want for _, row in rows), 0),
            *_arrays(
                [index for index, _ in rows],
                [row.slot for _, row in rows],
                [row.start for _, row in rows],
                [row.count for _, row in rows],
                ends,
                offsets,
                [at for at, _ in back],
                [offsets[at + 1] - 1 - back for at, back in back],
                [rows[at][1].slot for at, _ in back],
                [ends[at] - back for at, back in back],
            ),
        )
        return replace(found, branches=branches)._with_tree_positions() if branches else found

    def _with_tree_positions(self) -> "Batch":
        """Write sampled tokens of draft trees to their tree positions."""
        return replace(self, to_positions=self.positions[self.last] + 1)

    def filled_up(self, rows: int) -> "Batch":
        """Append rows of padding, up to `rows` rows of one token each."""
        missing = rows - len(self.slots)
        none, one = np.zeros(missing, np.int64), np.ones(missing, np.int64)
        return replace(
            self,
            rows=[*self.rows, *[Row(PADDING_SLOT, 0, 1)] * missing],
            indices=np.concatenate([self.indices, none]),
            slots=np.concatenate([self.slots, none + PADDING_SLOT]),
            starts=np.concatenate([self.starts, none]),
            counts=np.concatenate([self.counts, one]),
            ends=np.concatenate([self.ends, one]),
            offsets=np.arange(rows + 1),
        )

    def padded(self, tokens: int) -> "Batch":
        """Append one row of padding of so many tokens."""
        end = int(self.offsets[-1]) + tokens
        return replace(
            self,
            rows=[*self.rows, Row(PADDING_SLOT, 0, tokens)],
            indices=np.append(self.indices, 0),
            slots=np.append(self.slots, PADDING_SLOT),
            starts=np.append(self.starts, 0),
            counts=np.append(self.counts, tokens),
            ends=np.append(self.ends, tokens),
            offsets=np.append(self.offsets, end),
        )

    def outputs_at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Outputs whose tokens are written to these positions of these rows; all [n] int64."""
        drafts = np.array([row.drafts for row in self.rows], np.int64)
        first = np.searchsorted(self.sampling, rows)
        return first + positions - (self.ends[rows] - drafts[rows])

    @property
    def positions(self) -> np.ndarray:
        """Position of each of the step's tokens in its request; [tokens]."""
        found = self._in_rows()
        for at, branches in self.branches.items():
            found[self.offsets[at] : self.offsets[at + 1]] = branches.positions
        return found

    @property
    def places(self) -> np.ndarray:
        """Where each token is stored, which differs from its position in draft trees; [tokens]."""
        found = self._in_rows()
        for at, branches in self.branches.items():
            found[self.offsets[at] : self.offsets[at + 1]] = branches.places
        return found

    def _in_rows(self) -> np.ndarray:
        """Consecutive positions from the start of each row; [tokens]."""
        shifts = np.repeat(self.starts - self.offsets[:-1], self.counts)
        return np.arange(self.offsets[-1], dtype=np.int64) + shifts

    @property
    def rollback_checkpoints(self) -> np.ndarray:
        """(drafts of earlier rows, drafts of this row) of each row; [rows, 2]."""
        drafts = np.array([row.drafts if row.want & SAMPLE else 0 for row in self.rows], np.int64)
        return np.stack([np.cumsum(drafts) - drafts, drafts], axis=1)

    @property
    def branching_slots(self) -> list[int]:
        return [self.rows[at].slot for at in self.branches]

    @property
    def largest(self) -> tuple[int, int]:
        """Tokens and rows that every rank must have capacity for."""
        if self.whole_step is None:
            return int(self.offsets[-1]), len(self.slots)
        return self.whole_step.most_tokens, self.whole_step.most_rows

    @property
    def written(self) -> int:
        """Tokens written to the KV cache."""
        return int(self.offsets[-1]) if self.whole_step is None else len(self.whole_step.slots)

    def wanting(self, what: int) -> list[int]:
        """Rows with this wish."""
        return [at for at, row in enumerate(self.rows) if row.want & what]


def _arrays(*columns: list[int]) -> Iterator[np.ndarray]:
    """Each list as int64, all in one piece of memory.

    One array and plain Python are faster than many small arrays: reading a step's weights evicts
    numpy's code from the CPU caches, so each kind of array operation costs tens of microseconds.
    """
    packed, at = np.array([value for column in columns for value in column], np.int64), 0
    for column in columns:
        yield packed[at : at + len(column)]
        at += len(column)


def histories(batch: Batch, table: SlotTable) -> Tensor | None:
    """The tokens before each output, for draft trees whose requests use them (penalties, logit
    processors); the slot table has no contiguous history of a tree.

    returns: [outputs, longest + 1] int32 on the host; None = the slot table suffices.
    """
    looks_back = table.params["penalised"]
    if not any(looks_back[s] or s in table.processed for s in batch.branching_slots):
        return None
    known = table.tokens
    found = torch.zeros(len(batch.last), int(batch.to_positions.max()) + 1, dtype=torch.int32)
    for output, at in enumerate(batch.sampling.tolist()):
        slot, length = batch.rows[at].slot, int(batch.to_positions[output])
        mine = known[slot].cpu()  # sync: few requests look back
        found[output, :length] = mine[:length]
        branches = batch.branches.get(at)
        if branches is not None:
            path = branches.paths[int(batch.last[output] - batch.offsets[at])]
            found[output, branches.base : length] = mine[np.add(path, branches.base)]
    return found


def is_sampled_plainly(batch: Batch, table: SlotTable) -> bool:
    """Whether the recorded sampler can sample: no masks, biases, bans or logit processors."""
    if table.edited or table.processed:
        return False
    if any(table.params["penalised"][slot] for slot in batch.branching_slots):
        return False  # the table has no contiguous history of a draft in a tree
    return not any(row.masked for row in batch.rows)
