"""From a plan's rows and the slot table to the tensors of one step.

One pass over the rows, one copy to the device; tokens and page tables are gathered there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_

import numpy as np
import torch

from banyan.layers.step import Embedded, StepInputs
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.attention.base import AttentionBackend, GroupView, StepGeometry
from banyan.runner.kvstore import GroupLayout
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class Batch:
    """The rows of a plan that run, as host arrays of one entry per row.

    Attributes:
        wanted: what any row wants, or-ed.
        indices: index into StepPlan.rows.
        offsets: [rows + 1], first token of each row along the step's tokens.
        sampling: the rows that sample, as indices into the others.
        last: last token of each of those, along the step's tokens.
        to_slots: slot of each of those; to_positions: where its token goes.
    """

    rows: list[Row]
    wanted: int
    indices: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    """Position after the last one of each row."""
    offsets: np.ndarray
    sampling: np.ndarray
    last: np.ndarray
    to_slots: np.ndarray
    to_positions: np.ndarray

    @classmethod
    def of(cls, rows: list[tuple[int, Row]]) -> "Batch":
        ends = [row.start + row.count for _, row in rows]
        offsets = [0, *accumulate(row.count for _, row in rows)]
        sampling = [at for at, (_, row) in enumerate(rows) if row.want & SAMPLE]
        return cls(
            [row for _, row in rows],
            reduce(or_, (row.want for _, row in rows), 0),
            *_arrays(
                [index for index, _ in rows],
                [row.slot for _, row in rows],
                [row.start for _, row in rows],
                [row.count for _, row in rows],
                ends,
                offsets,
                sampling,
                [offsets[at + 1] - 1 for at in sampling],
                [rows[at][1].slot for at in sampling],
                [ends[at] for at in sampling],
            ),
        )

    def wanting(self, what: int) -> list[int]:
        """The rows that want it."""
        return [at for at, row in enumerate(self.rows) if row.want & what]


def _arrays(*columns: list[int]) -> Iterator[np.ndarray]:
    """Each list as int64, all in one piece of memory.

    A step's weights sweep the code of numpy out of the caches, so that in a short step each kind
    of array operation costs tens of microseconds; plain numbers cost less.
    """
    packed, at = np.array([value for column in columns for value in column], np.int64), 0
    for column in columns:
        yield packed[at : at + len(column)]
        at += len(column)


def build_inputs(
    batch: Batch,
    table: SlotTable,
    groups: tuple[GroupLayout, ...],
    attention: AttentionBackend,
    device: torch.device,
) -> StepInputs:
    """Tensors of a step of at least one row."""
    num_rows, num_tokens = len(batch.rows), int(batch.offsets[-1])
    slot_of = np.repeat(batch.slots, batch.counts)
    positions = np.arange(num_tokens) + np.repeat(batch.starts - batch.offsets[:-1], batch.counts)
    packed = np.concatenate([slot_of, positions, batch.slots, batch.starts, batch.offsets])
    on_device = torch.from_numpy(packed).to(device, non_blocking=True)
    slot_of_token, position, slots, starts, offsets = on_device.split(
        [num_tokens, num_tokens, num_rows, num_rows, num_rows + 1]
    )
    longest = int(batch.ends.max())
    views = []
    for pages, layout in zip(table.pages, groups, strict=True):
        width = layout.columns(longest)
        page = pages[slot_of_token, layout.column(position)].long()  # [tokens]
        views.append(GroupView(pages[slots, :width], layout.locate(page, position)))
    geometry = StepGeometry(offsets.int(), starts.int(), tuple(views))
    return StepInputs(
        tokens=table.tokens[slot_of_token, position].long(),
        positions=position,
        attention=attention.bind(geometry),
        embedded=_embedded(batch, table),
    )


def _embedded(batch: Batch, table: SlotTable) -> Embedded | None:
    """The tokens of a step that come as embeddings; None when there are none."""
    where, rows = [], []
    for at, slot in enumerate(batch.slots.tolist() if table.embeds else ()):
        given = table.embeds.get(slot)
        if given is None or batch.starts[at] >= len(given):
            continue
        mine = given[batch.starts[at] : batch.ends[at]]
        rows.append(mine)
        where.append(np.arange(len(mine)) + batch.offsets[at])
    if not rows:
        return None
    indices = torch.from_numpy(np.concatenate(where)).to(rows[0].device)
    return Embedded(indices, torch.cat(rows))


def has_embedded(batch: Batch, table: SlotTable) -> bool:
    """Whether a row of the batch begins within a prompt of embeddings."""
    embeds = table.embeds
    return any(
        slot in embeds and start < len(embeds[slot])
        for slot, start in zip(batch.slots.tolist(), batch.starts.tolist(), strict=True)
    )
