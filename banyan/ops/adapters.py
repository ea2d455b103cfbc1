"""Low-rank adapters (LoRA, arXiv 2106.09685) as ops see them: the matrices of a projection by the
adapter's number, and which tokens of a step have which adapter.

Both lie in memory that stays where it is, so that recorded work finds other adapters there later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MAX_PARTS = 4
"""Parts of one projection; csrc/adapters.h has the same number."""
_WORDS = 5 + 4 * MAX_PARTS
_PIECE = 32
"""Most tokens that share one reading of an adapter's matrices."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of csrc/adapters.h."""


@dataclass(frozen=True)
class Part:
    """What an adapter adds to some neighbouring outputs: scale · up · (down · x).

    Attributes:
        first: the first of these outputs.
        down: [rank, in]; up: [outputs, rank]; both of one float type.
    """

    first: int
    down: Tensor
    up: Tensor
    scale: float


class AdapterTable:
    """What adapters add to one projection, by their number; 0 is none.

    Args:
        inputs: of the projection on this rank.
        width: most ranks that the parts of one adapter have together.
        capacity: the highest number.
    """

    def __init__(self, inputs: int, width: int, capacity: int) -> None:
        self.inputs = inputs
        self.width = width
        self.parts: list[tuple[Part, ...]] = [()] * (capacity + 1)
        self.entries = torch.zeros((capacity + 1, _WORDS), dtype=torch.int64)
        """AdapterPair of csrc/adapters.h."""
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def enter(self, number: int, parts: Sequence[Part]) -> None:
        """Take an adapter's parts in the place of what had the number; () lets go of it. Nothing
        may run meanwhile."""
        self._kept.pop(number, None)
        self.parts[number] = tuple(parts)
        self.entries[number] = 0
        if not parts:
            return
        types = {part.down.dtype for part in parts} | {part.up.dtype for part in parts}
        dtype = types.pop() if len(types) == 1 else torch.float32
        down = torch.cat([part.down.to(dtype) for part in parts])  # [rank, in]
        up = torch.cat([part.up.to(dtype).t().reshape(-1) for part in parts])
        scales = torch.cat([torch.full((len(part.down),), part.scale) for part in parts])
        assert len(parts) <= MAX_PARTS and down.shape[1] == self.inputs and len(down) <= self.width
        words = [down.data_ptr(), up.data_ptr(), scales.data_ptr(), len(down), _TYPES[dtype]]
        at = 0
        for part in parts:
            words += [part.first, len(part.up), at, len(part.down)]
            at += len(part.down)
        self._kept[number] = (down, up, scales)
        self.entries[number, : len(words)] = torch.tensor(words)


class AdapterTokens:
    """Which tokens of a step have which adapter, in pieces of one adapter each.

    Args:
        max_tokens: of the largest step.
    """

    def __init__(self, max_tokens: int) -> None:
        self.pieces = torch.zeros(1 + 3 * max_tokens, dtype=torch.int32)
        """[0] how many, then (adapter, first, count) of each, in places of `order`."""
        self.order = torch.zeros(max_tokens, dtype=torch.int32)
        self._pieces, self._order = self.pieces.numpy(), self.order.numpy()

    def fill(self, adapters: np.ndarray) -> None:
        """adapters: [tokens], the number of each token's, 0 for none."""
        self._pieces[0] = 0
        with_one = np.flatnonzero(adapters)
        if not len(with_one):
            return
        order = with_one[np.argsort(adapters[with_one], kind="stable")]
        numbers = adapters[order]
        self._order[: len(order)] = order
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
        found = [
            (int(numbers[start]), first, min(_PIECE, end - first))
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True)
            for first in range(start, end, _PIECE)
        ]
        self._pieces[1 : 1 + 3 * len(found)] = np.array(found, np.int32).reshape(-1)
        self._pieces[0] = len(found)

    def groups(self) -> list[tuple[int, Tensor]]:
        """(adapter, its tokens [n] int64), for kernels that call Python."""
        pieces = self._pieces[1 : 1 + 3 * int(self._pieces[0])].reshape(-1, 3).tolist()
        return [(number, self.order[at : at + count].long()) for number, at, count in pieces]


class AdapterOps(Protocol):
    """See `ops.api.Ops`."""

    def adapt(self, out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
        """Add to each token's outputs what its adapter makes of its inputs, the sum over the parts
        of scale · up · (down · x), summed in fp32; `out` changes in place.

        out: [tokens, out] T; x: [tokens, in] T.
        """
        ...
