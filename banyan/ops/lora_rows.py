"""What adapters do to whole rows: of the embedding, of the logits, and of a projection's outputs
(DoRA, arXiv 2402.09353). By the adapter's number, in memory that stays where it is.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from banyan.ops.lora import AdapterTokens, bytes_of

LOOKED_UP, PRODUCT, GAIN, SOME_LOOKED_UP, SOME_OUTPUTS = 1, 2, 3, 4, 5
"""Kinds of parts; csrc/adapter_rows.cpp has the same numbers."""
_WORDS = 8


@dataclass(frozen=True)
class RowPart:
    """What one adapter does to a row. All fp32 and contiguous.

    LOOKED_UP: rows[token − first] is taken, and nothing happens to tokens that have none.
    PRODUCT: rows · x is taken. Of either, times `up` where there is one, is added to the row, or
    replaces it. GAIN: the row becomes rows · row + shifts. SOME_LOOKED_UP: rows[i] replaces the row
    of a token that is ids[i]. SOME_OUTPUTS: rows[i] · x replaces the row's number ids[i].

    Attributes:
        rows: [ids, any], [any, inputs], or [outputs].
        up: [any, outputs].
        shifts: [outputs].
        ids: int64, in growing order.
    """

    kind: int
    rows: Tensor
    up: Tensor | None = None
    shifts: Tensor | None = None
    first: int = 0
    replaces: bool = False
    ids: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return bytes_of(t for t in (self.rows, self.up, self.shifts, self.ids) if t is not None)


class RowTable:
    """The parts of adapters for one kind of row, by their number; 0 is none.

    Args:
        capacity: the highest number.
    """

    def __init__(self, capacity: int) -> None:
        self.parts: list[RowPart | None] = [None] * (capacity + 1)
        self.entries = torch.zeros((capacity + 1, _WORDS), dtype=torch.int64)
        """RowEntry of csrc/adapter_rows.cpp."""

    def enter(self, number: int, part: RowPart | None) -> None:
        """Take an adapter's part in the place of what had the number; None lets go of it. Nothing
        may run meanwhile."""
        self.parts[number] = part
        self.entries[number] = 0
        if part is None:
            return
        given = [tensor for tensor in (part.rows, part.up, part.shifts) if tensor is not None]
        assert all(t.dtype == torch.float32 and t.is_contiguous() for t in given)
        last = part.shifts if part.ids is None else part.ids
        pointers = [0 if t is None else t.data_ptr() for t in (part.rows, part.up, last)]
        rank = 0 if part.up is None else len(part.up)
        words = [*pointers, rank, part.first, len(part.rows), part.kind, int(part.replaces)]
        self.entries[number] = torch.tensor(words)


class AdapterRowOps(Protocol):
    """See `ops.api.Ops`."""

    def adapt_rows(self, out: Tensor, x: Tensor, table: RowTable, tokens: AdapterTokens) -> None:
        """Do to each row what its adapter's part says, summed in fp32; `out` changes in place.

        out: [tokens, outputs] T; x: [tokens] int64 for parts that are looked up, else
        [tokens, inputs] T, which parts of gains do not read.
        """
        ...
