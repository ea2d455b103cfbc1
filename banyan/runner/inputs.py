"""From a plan's rows and the slot table to the tensors of one step.

One pass over the rows, one copy to the device; tokens and page tables are gathered there.
"""

from dataclasses import dataclass

import numpy as np
import torch

from banyan.layers.step import Embedded, StepInputs
from banyan.messages.plan import HIDDEN, POOL, SAMPLE, SCORE, Row
from banyan.runner.attention.base import AttentionBackend, GroupView, StepGeometry
from banyan.runner.kvstore import GroupLayout
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class Batch:
    """The rows of a plan that run, as host arrays of one entry per row.

    Attributes:
        indices: index into StepPlan.rows.
        offsets: [rows + 1], first token of each row along the step's tokens.
    """

    rows: list[Row]
    indices: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    samples: np.ndarray
    scores: np.ndarray
    pools: np.ndarray
    hides: np.ndarray

    @classmethod
    def of(cls, rows: list[tuple[int, Row]]) -> "Batch":
        facts = np.array(
            [(i, r.slot, r.start, r.count, r.want) for i, r in rows], np.int64
        ).reshape(-1, 5)
        indices, slots, starts, counts, wants = facts.T
        return cls(
            rows=[row for _, row in rows],
            indices=indices,
            slots=slots,
            starts=starts,
            counts=counts,
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            samples=(wants & SAMPLE) != 0,
            scores=(wants & SCORE) != 0,
            pools=(wants & POOL) != 0,
            hides=(wants & HIDDEN) != 0,
        )

    @property
    def ends(self) -> np.ndarray:
        """Position after the last one of each row: where a sampled token goes."""
        return self.starts + self.counts


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
        size = layout.page_size
        width = -(-longest // size)
        page = pages[slot_of_token, position // size].long()  # [tokens]
        views.append(GroupView(pages[slots, :width], page * size + position % size))
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
