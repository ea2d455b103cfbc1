"""LoRA adapters (arXiv 2106.09685) in the form that ops read: tables of matrices by adapter number,
the tokens of each adapter in a step, and adapters of whole rows and of experts.

All tables stay at their addresses, so a recorded program or graph can run later with other
adapters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from banyan.base.errors import ConfigError
from banyan.ops.host_memory import HUGE_PAGE, Arena, copy_to


@dataclass(frozen=True)
class Matrices:
    """An adapter's delta for one part of a projection: up · (down · x).

    Attributes:
        first: the first of the part's outputs.
        down: [rank, in]; up: [outputs, rank]; fp32, the scale is in `up`.
    """

    first: int
    down: Tensor
    up: Tensor


class AdapterStack:
    """The adapters of one projection, stacked in device memory.

    Args:
        inputs: inputs of the projection on this rank.
        outputs: outputs of each part of the projection.
        rank: largest rank of an adapter.
        capacity: most adapters.
        dtype: type of all numbers.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        rank: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.outputs = tuple(outputs)
        self.shape = len(outputs), capacity, rank
        self.down = zeros(*self.shape, inputs)
        """[parts, capacity, rank, in]."""
        self.up = zeros(capacity * rank * sum(outputs))
        """All parts one after another, each [capacity, rank, outputs]."""
        self._firsts = [sum(outputs[:at]) for at in range(len(outputs))]
        ups = self.up.split([capacity * rank * size for size in outputs])
        self._ups = [up.view(capacity, rank, -1) for up in ups]

    @property
    def size_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def place(self, parts: Sequence[Matrices]) -> list[Tensor]:
        """The tensors of one adapter, on the host: [parts, rank, in], and per part
        [rank, outputs].

        Raises:
            ConfigError: a number is too large for the type.
        """
        dtype = self.down.dtype
        assert len({part.first for part in parts}) == len(parts)
        down = torch.zeros(self.down[:, 0].shape, dtype=dtype)
        ups = [torch.zeros(up[0].shape, dtype=dtype) for up in self._ups]
        for part in parts:
            at, rank = self._firsts.index(part.first), len(part.down)
            down[at, :rank] = part.down
            ups[at][:rank] = part.up.t()
        for made in (down, *ups):
            if not made.isfinite().all():  # times nothing it would be no number, for all tokens
                raise ConfigError(
                    f"an adapter has numbers that are too large for {str(dtype)[6:]}",
                    hint="give --dtype bfloat16, or merge it into the weights",
                )
        return [down, *ups]

    def enter(self, number: int, placed: Sequence[Tensor]) -> None:
        """Store the result of `place` under a number, from 1; () clears the number.

        Runs in the order of the current stream.
        """
        mine = [self.down[:, number - 1], *(up[number - 1] for up in self._ups)]
        if not placed:
            for tensor in mine:
                tensor.zero_()
        for tensor, values in zip(mine, placed, strict=bool(placed)):
            tensor.copy_(copy_to(values, tensor.device))

    def add(self, out: Tensor, x: Tensor, others: Tensor) -> None:
        """As `adapt` of ops/lora.py.

        out: [tokens, out]; x: [tokens, in]; others: [any, capacity] bool, True for the
            adapters that are not the token's.
        """
        tokens, parts, ranks = len(x), self.shape[0], self.shape[1] * self.shape[2]
        made = x.to(self.down.dtype) @ self.down.flatten(0, 2).t()
        made = made.view(tokens, *self.shape)
        made = made.masked_fill(others[:tokens, None, :, None], 0).view(tokens, parts, ranks)
        for at, (first, up) in enumerate(zip(self._firsts, self._ups, strict=True)):
            out[:, first : first + up.shape[2]].addmm_(made[:, at], up.view(ranks, -1))


MAX_PARTS = 4
"""Parts of one projection; csrc/lora.h has the same number."""
_WORDS = 5 + 4 * MAX_PARTS
_PIECE = 32
"""Most tokens that share one read of an adapter's matrices."""
_TILE, _RANKS = 16, 8
"""Tile sizes of matrices in memory (csrc/lora.h)."""
_PROGRESS = 16
_MOST_TWOS = 60
"""Largest power of two of a scale; the product of two still fits float32."""
_MOST_LEVEL = 127
_MOST_CHANGE = 0.015
"""Largest relative change (Frobenius norm) of a matrix that is stored in 8 bits. Normally
distributed numbers change by half of that."""
_LANES, _BLOCK, _MOST_PADDING = 16, 32, 1.34
"""Ranks and inputs of a tile of csrc/linear.h, and the most padding allowed."""
_TILED = 4
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Numbers of csrc/lora.h."""


@dataclass(frozen=True)
class AdapterPart:
    """An adapter's delta for some consecutive outputs: scale · up · (down · x).

    Attributes:
        first: the first of the outputs.
        down: [rank, in]; up: [outputs, rank]; both of one float type.
    """

    first: int
    down: Tensor
    up: Tensor
    scale: float


class AdapterTable:
    """The adapters of one projection, by number; 0 = no adapter.

    Args:
        inputs: inputs of the projection on this rank.
        width: largest sum of the ranks of one adapter's parts.
        capacity: the highest number.
        is_rounded: the projection's weights are rounded, so the adapters' matrices are too: to 8
            bits if none changes much, else float32 ones to half precision.
        keeps_parts: keep the matrices unchanged, for the plain op.
        stack: the adapters in device memory; None = they are in host memory.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        capacity: int,
        is_rounded: bool = False,
        keeps_parts: bool = True,
        stack: AdapterStack | None = None,
    ) -> None:
        self.is_rounded, self.keeps_parts = is_rounded, keeps_parts
        self.stack = stack
        self.inputs = inputs
        self.width = width
        self.parts: list[tuple[AdapterPart, ...]] = [()] * (capacity + 1)
        self.entries = torch.zeros((capacity + 1, _WORDS), dtype=torch.int64)
        """AdapterPair of csrc/lora.h."""
        self.progress = torch.zeros(_PROGRESS, dtype=torch.int64)
        """AdapterState: progress of the threads of a run."""
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def place(self, parts: Sequence[AdapterPart], arena: Arena) -> "PlacedParts":
        """Prepare an adapter's parts for `enter`.

        arena: memory for the matrices; one arena per adapter keeps them together.
        """
        assert 0 < len(parts) <= MAX_PARTS and parts[0].down.shape[1] == self.inputs
        if self.stack is not None:
            given = [Matrices(p.first, p.down.float(), p.up.float() * p.scale) for p in parts]
            return PlacedParts(self.stack.place(given), [], [], sum(len(p.down) for p in parts))
        placed = tiled_parts(parts, arena) if self.is_rounded else None
        placed = placed or placed_parts(parts, arena, self.is_rounded)
        assert placed.rank <= self.width
        return replace(placed, parts=tuple(parts) if self.keeps_parts else ())

    def enter(self, number: int, parts: "Sequence[AdapterPart] | PlacedParts") -> None:
        """Store an adapter's parts under a number; () clears it. No step may run meanwhile."""
        self._kept.pop(number, None)
        self.parts[number] = ()
        self.entries[number] = 0
        if not parts:
            if self.stack is not None:
                self.stack.enter(number, ())
            return
        placed = parts if isinstance(parts, PlacedParts) else self.place(parts, Arena(HUGE_PAGE))
        if self.stack is not None:
            self.stack.enter(number, placed.tensors)
            return
        self.parts[number] = placed.parts
        self._kept[number] = tuple(placed.tensors)
        self.entries[number] = torch.tensor(part_words(placed.head, placed.ranges))


@dataclass(frozen=True)
class PlacedParts:
    """Matrices in the kernels' memory order.

    Attributes:
        tensors: tensors that must stay at their addresses, or that go to a stack.
        head: the first words of AdapterPair (csrc/lora.h); [] for a stack.
        ranges: words of each part in AdapterPair.
        rank: sum of the ranks of all parts.
        parts: the original parts, if they are kept.
    """

    tensors: list[Tensor]
    head: list[int]
    ranges: list[tuple[int, int, int, int]]
    rank: int
    parts: tuple[AdapterPart, ...] = ()

    @property
    def loose_bytes(self) -> int:
        """Bytes outside the arenas."""
        if not self.head:
            return bytes_of(self.tensors)
        return bytes_of(matrix for part in self.parts for matrix in (part.down, part.up))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def placed_parts(parts: Sequence[AdapterPart], arena: Arena, is_rounded: bool) -> PlacedParts:
    """The parts of one projection in the kernels' form.

    is_rounded: as for AdapterTable.
    """
    types = {part.down.dtype for part in parts} | {part.up.dtype for part in parts}
    dtype = types.pop() if len(types) == 1 else torch.float32
    scales = torch.cat([torch.full((len(part.down),), part.scale) for part in parts])
    if is_rounded:
        if (levels := _levels(parts)) is not None:
            dtype, (parts, scales) = torch.int8, levels
        elif dtype == torch.float32:
            dtype, (parts, scales) = torch.float16, _evened(parts)
    whole = torch.cat([part.down.to(dtype) for part in parts])  # [rank, in]
    down = _placed(_down_tiles(whole), arena)
    up = _placed(torch.cat([_up_tiles(part.up.to(dtype), part.first) for part in parts]), arena)
    head = [down.data_ptr(), up.data_ptr(), scales.data_ptr(), len(whole), _TYPES[dtype]]
    return PlacedParts([down, up, scales], head, _ranges(parts), len(whole))


def _ranges(parts: Sequence[AdapterPart]) -> list[tuple[int, int, int, int]]:
    ranges, at = list[tuple[int, int, int, int]](), 0
    for part in parts:
        first, last = part.first // _TILE, -(-(part.first + len(part.up)) // _TILE)
        ranges.append((first, last - first, at, len(part.down)))
        at += len(part.down)
    return ranges


def tiled_parts(parts: Sequence[AdapterPart], arena: Arena) -> PlacedParts | None:
    """The parts in 8 bits, with `down` in weight tiles (W8 of csrc/linear.h) like the base weight.

    None = that would change a matrix too much, or there are too few ranks.
    """
    rank = sum(len(part.down) for part in parts)
    padded = -(-rank // _LANES) * _LANES
    if padded > _MOST_PADDING * rank or (found := _levels(parts)) is None:
        return None
    down = torch.cat([part.down.float() for part in parts])
    if (tiles := _weight_tiles(functional.pad(down, (0, 0, 0, padded - rank)))) is None:
        return None
    levels = found[0]
    worths = [
        part.scale * part.up.float().abs().amax(0).clamp_min(1e-30) / _MOST_LEVEL for part in parts
    ]
    scales = functional.pad(torch.cat(worths).float(), (0, padded - rank)).contiguous()
    up = _placed(torch.cat([_up_tiles(part.up, part.first) for part in levels]), arena)
    tiles = _placed(tiles, arena)
    head = [tiles.data_ptr(), up.data_ptr(), scales.data_ptr(), rank, _TILED]
    return PlacedParts([tiles, up, scales], head, _ranges(parts), rank)


def _weight_tiles(down: Tensor) -> Tensor | None:
    """Bytes of [ranks, in] float32, in tiles of 16 ranks by 32 inputs: scales in half precision,
    then numbers from 0 to 255 (128 = zero), by 4 inputs, then by rank."""
    blocks = functional.pad(down, (0, -down.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    worth = (blocks.abs().amax(2, keepdim=True) / _MOST_LEVEL).half().float()
    levels = torch.where(worth > 0, blocks / worth, 0).round().clamp(-_MOST_LEVEL, _MOST_LEVEL)
    if (
        not worth.isfinite().all()
        or (levels * worth - blocks).norm() > _MOST_CHANGE * blocks.norm()
    ):
        return None
    groups = (levels + 128).to(torch.uint8).unflatten(0, (-1, _LANES))  # [groups, 16, blocks, 32]
    numbers = groups.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4).flatten(2)
    scales = worth[:, :, 0].half().unflatten(0, (-1, _LANES)).transpose(1, 2).contiguous()
    return torch.cat([scales.view(torch.uint8), numbers], dim=2).flatten()


def part_words(head: Sequence[int], ranges: Sequence[tuple[int, int, int, int]] = ()) -> list[int]:
    """An AdapterPair of csrc/lora.h."""
    words = [*head, *(word for range_ in ranges for word in range_)]
    return words + [0] * (_WORDS - len(words))


def _placed(values: Tensor, arena: Arena) -> Tensor:
    placed = arena.take(values.nbytes).view(values.dtype)
    return placed.copy_(values)


def _exponents(x: Tensor) -> Tensor:
    return torch.frexp(x).exponent.clamp(-_MOST_TWOS, _MOST_TWOS)


def _evened(parts: Sequence[AdapterPart]) -> tuple[list[AdapterPart], Tensor]:
    """The parts in float32, scaled so that each rank's largest number is between 1/2 and 1, and the
    scales. Scales are powers of two, so half precision loses digits but never overflows."""
    evened, scales = [], []
    for part in parts:
        down, up = part.down.float(), part.up.float()
        by_down = _exponents(down.abs().amax(1))  # [rank]
        by_up = _exponents(up.abs().amax(0))
        down, up = torch.ldexp(down, -by_down[:, None]), torch.ldexp(up, -by_up)
        scales.append(torch.ldexp(torch.full((len(down),), part.scale), by_down + by_up))
        evened.append(AdapterPart(part.first, down, up, part.scale))
    return evened, torch.cat(scales)


def _levels(parts: Sequence[AdapterPart]) -> tuple[list[AdapterPart], Tensor] | None:
    """The parts in 8 bits, with 127 as each rank's largest number in both matrices, and the scales.
    None = that would change a matrix too much."""
    levels, scales = [], []
    for part in parts:
        down, up = _levels_of(part.down, 1), _levels_of(part.up, 0)
        if down is None or up is None:
            return None
        levels.append(AdapterPart(part.first, down[0], up[0], part.scale))
        scales.append((part.scale * down[1] * up[1]).float())
    return levels, torch.cat(scales)


def _levels_of(matrix: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    """Int8 levels and the float64 scale of each rank. dim: the dimension that is not the rank."""
    exact = matrix.double()
    worth = exact.abs().amax(dim) / _MOST_LEVEL
    worth[worth == 0] = 1.0
    levels = (exact / worth.unsqueeze(dim)).round()
    change = (levels * worth.unsqueeze(dim) - exact).norm()
    return None if change > _MOST_CHANGE * exact.norm() else (levels.to(torch.int8), worth)


def _down_tiles(down: Tensor) -> Tensor:
    """Tiles of [rank, in], by _RANKS ranks and then by _TILE inputs, as one row."""
    padded = functional.pad(down, (0, -down.shape[1] % _TILE))
    blocks = [block.view(len(block), -1, _TILE).transpose(0, 1) for block in padded.split(_RANKS)]
    return torch.cat([block.reshape(-1) for block in blocks])


def _up_tiles(up: Tensor, first: int) -> Tensor:
    """Tiles of `up` [outputs, rank], whose first output is `first`, as one row."""
    before = first % _TILE
    padded = functional.pad(up, (0, 0, before, -(before + len(up)) % _TILE))
    return padded.view(-1, _TILE, up.shape[1]).transpose(1, 2).reshape(-1)


class AdapterTokens:
    """The adapters of a step's tokens, in pieces of one adapter each.

    Args:
        max_tokens: tokens of the largest step.
        others: [max_tokens, capacity] bool in device memory, True for the adapters, from 1, that
            are not the token's. None = there are no stacks.
    """

    def __init__(self, max_tokens: int, others: Tensor | None = None) -> None:
        self.others = others
        self._stacked = None
        if others is not None:
            self._stacked = torch.arange(1, others.shape[1] + 1, device=others.device)
        self.pieces = torch.zeros(1 + 3 * max_tokens, dtype=torch.int32)
        """[0] the number of pieces, then (adapter, first, count) of each, as indices of `order`."""
        self.order = torch.zeros(max_tokens, dtype=torch.int32)
        self.numbers = torch.zeros(max_tokens, dtype=torch.int32)
        """[tokens], the adapter of each; valid only if there are pieces."""
        self._pieces, self._order = self.pieces.numpy(), self.order.numpy()
        self._numbers = self.numbers.numpy()
        self._inner: dict[int, np.ndarray] = {}

    def inner(self, width: int) -> np.ndarray:
        """[max_tokens, width] float32 scratch memory for one op at a time; the same at every
        call."""
        if width not in self._inner:
            self._inner[width] = np.empty((len(self._order), width), np.float32)
        return self._inner[width]

    def fill(self, adapters: np.ndarray) -> None:
        """adapters: [tokens], adapter number of each token; 0 = none."""
        self._pieces[0] = 0
        with_one = np.flatnonzero(adapters)
        if not len(with_one):
            return
        order = with_one[np.argsort(adapters[with_one], kind="stable")]
        numbers = adapters[order]
        self._order[: len(order)] = order
        self._numbers[: len(adapters)] = adapters
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
        found = [
            (int(numbers[start]), first, min(_PIECE, end - first))
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True)
            for first in range(start, end, _PIECE)
        ]
        self._pieces[1 : 1 + 3 * len(found)] = np.array(found, np.int32).reshape(-1)
        self._pieces[0] = len(found)

    def mark(self, adapters: Tensor) -> None:
        """`fill`, on the device. adapters: [tokens] int64."""
        assert self.others is not None and self._stacked is not None
        self.others[: len(adapters)] = adapters.unsqueeze(1) != self._stacked

    def groups(self) -> list[tuple[int, Tensor]]:
        """(adapter, its tokens [n] int64), for kernels in Python."""
        pieces = self._pieces[1 : 1 + 3 * int(self._pieces[0])].reshape(-1, 3).tolist()
        return [(number, self.order[at : at + count].long()) for number, at, count in pieces]


class AdapterOps(Protocol):
    """See `ops.api.Ops`."""

    def adapt(self, out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
        """Add each token's LoRA delta to `out`, in place: the sum over the adapter's parts of
        scale · up · (down · x), in fp32.

        out: [tokens, out] T; x: [tokens, in] T.
        """
        ...


LOOKED_UP, PRODUCT, GAIN, SOME_LOOKED_UP, SOME_OUTPUTS = 1, 2, 3, 4, 5
"""Kinds of parts; csrc/lora_rows.cpp has the same numbers."""
_ROW_WORDS = 8


@dataclass(frozen=True)
class RowPart:
    """One adapter's edit of a row. All tensors are fp32 and contiguous.

    LOOKED_UP uses rows[token − first], and leaves tokens outside of `rows` unchanged. PRODUCT uses
    rows · x. Both multiply that by `up`, if given, and add it to the row or replace the row with
    it. GAIN: the row becomes rows · row + shifts. SOME_LOOKED_UP: rows[i] replaces the row of token
    ids[i]. SOME_OUTPUTS: rows[i] · x replaces the row's number ids[i].

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
    """The parts of adapters for one kind of row, by adapter number; 0 = none.

    Args:
        capacity: the highest number.
    """

    def __init__(self, capacity: int) -> None:
        self.parts: list[RowPart | None] = [None] * (capacity + 1)
        self.entries = torch.zeros((capacity + 1, _ROW_WORDS), dtype=torch.int64)
        """RowEntry of csrc/lora_rows.cpp."""

    def enter(self, number: int, part: RowPart | None) -> None:
        """Store an adapter's part under a number; None clears it. No step may run meanwhile."""
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
        """Apply each row's adapter part to `out`, in place, with fp32 sums.

        out: [tokens, outputs] T; x: [tokens] int64 for LOOKED_UP parts, else
        [tokens, inputs] T; GAIN does not read it.
        """
        ...


@dataclass(frozen=True)
class ExpertPart:
    """An adapter's delta for one part of an expert's projection: scale · up · (down · x).

    Attributes:
        part: which one of "gate_up": 0 the gate, 1 the up; 0 of "down".
        down: [rank, in]; up: [outputs, rank]; both of one float type.
    """

    part: int
    down: Tensor
    up: Tensor
    scale: float


class ExpertTable:
    """The adapters of one projection of experts, by number; 0 = no adapter.

    Args:
        inputs: inputs of the projection on this rank.
        experts: experts of this rank.
        width: largest sum of the ranks of one expert's parts.
        capacity: the highest number.
        is_rounded: as for `AdapterTable`.
    """

    def __init__(
        self, inputs: int, experts: int, width: int, capacity: int, is_rounded: bool = False
    ) -> None:
        self.inputs, self.experts, self.width = inputs, experts, width
        self.is_rounded = is_rounded
        self.parts: list[Mapping[int, Sequence[ExpertPart]]] = [{}] * (capacity + 1)
        """Per adapter: expert, relative to this rank's first -> its parts."""
        self.entries = torch.zeros(capacity + 1, dtype=torch.int64)
        """Per adapter: the address of AdapterPair [experts] (csrc/lora.h), or 0."""
        self._kept: dict[int, list[Tensor]] = {}

    def place(self, parts: Mapping[int, Sequence[ExpertPart]], arena: Arena) -> "PlacedExperts":
        """Prepare an adapter's parts for `enter`.

        arena: memory for the matrices.
        """
        kept: list[Tensor] = []
        rows = torch.zeros((self.experts, len(part_words([]))), dtype=torch.int64)
        for expert, its in parts.items():
            rows[expert] = torch.tensor(self._words(its, arena, kept))
        return PlacedExperts(dict(parts), rows, kept)

    def enter(
        self, number: int, parts: "Mapping[int, Sequence[ExpertPart]] | PlacedExperts"
    ) -> None:
        """Store an adapter's parts under a number; {} clears it. No step may run meanwhile."""
        self.entries[number] = 0
        self.parts[number] = {}
        self._kept.pop(number, None)
        if not parts:
            return
        placed = parts if isinstance(parts, PlacedExperts) else self.place(parts, Arena(HUGE_PAGE))
        self.parts[number] = placed.parts
        self._kept[number] = [*placed.tensors, placed.rows]
        self.entries[number] = placed.rows.data_ptr()

    def _words(self, parts: Sequence[ExpertPart], arena: Arena, kept: list[Tensor]) -> list[int]:
        by_part = {part.part: AdapterPart(0, part.down, part.up, part.scale) for part in parts}
        given = [by_part[at] for at in sorted(by_part)]
        assert all(part.down.shape[1] == self.inputs for part in given)
        placed = placed_parts(given, arena, self.is_rounded)
        assert placed.rank <= self.width, f"{placed.rank} ranks, room for {self.width}"
        kept += placed.tensors
        ranges = dict(zip(sorted(by_part), placed.ranges, strict=True))
        absent = (0, 0, 0, 0)
        return part_words(placed.head, [ranges.get(at, absent) for at in range(max(by_part) + 1)])


@dataclass(frozen=True)
class PlacedExperts:
    """An adapter's parts in the kernels' form.

    Attributes:
        parts: the original parts.
        rows: AdapterPair of each expert.
        tensors: tensors that must stay at their addresses.
    """

    parts: Mapping[int, Sequence[ExpertPart]]
    rows: Tensor
    tensors: list[Tensor]

    @property
    def loose_bytes(self) -> int:
        """Bytes outside the arenas."""
        given = [part for its in self.parts.values() for part in its]
        return self.rows.nbytes + bytes_of(m for part in given for m in (part.down, part.up))


@dataclass(frozen=True)
class ExpertSides:
    """LoRA adapters of a layer's experts: tables of both projections, and the tokens' adapters."""

    gate_up: ExpertTable
    down: ExpertTable
    tokens: AdapterTokens
