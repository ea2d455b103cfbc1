"""Low-rank adapters of experts as ops see them: the matrices of one projection of all experts that
a rank has, by the adapter's number. Lies, as `AdapterTable` does, in memory that stays where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ops.arena import HUGE_PAGE, Arena
from banyan.ops.lora import AdapterTokens, Part, bytes_of, part_words, placed_parts


@dataclass(frozen=True)
class ExpertPart:
    """What an adapter adds to one part of an expert's projection: scale · up · (down · x).

    Attributes:
        part: which one of "gate_up": 0 the gate, 1 the up; 0 of "down".
        down: [rank, in]; up: [outputs, rank]; both of one float type.
    """

    part: int
    down: Tensor
    up: Tensor
    scale: float


class ExpertTable:
    """What adapters add to one projection of experts, by their number; 0 is none.

    Args:
        inputs: of the projection on this rank.
        experts: how many this rank has.
        width: most ranks that the parts of one expert have together.
        capacity: the highest number.
        is_rounded: as for `AdapterTable`.
    """

    def __init__(
        self, inputs: int, experts: int, width: int, capacity: int, is_rounded: bool = False
    ) -> None:
        self.inputs, self.experts, self.width = inputs, experts, width
        self.is_rounded = is_rounded
        self.parts: list[Mapping[int, Sequence[ExpertPart]]] = [{}] * (capacity + 1)
        """By adapter: expert, counted from the first one here -> its parts."""
        self.entries = torch.zeros(capacity + 1, dtype=torch.int64)
        """By adapter: the address of AdapterPair [experts] of csrc/adapters.h, or 0."""
        self._kept: dict[int, list[Tensor]] = {}

    def place(self, parts: Mapping[int, Sequence[ExpertPart]], arena: Arena) -> "PlacedExperts":
        """An adapter's parts as they are entered.

        arena: where its matrices lie.
        """
        kept: list[Tensor] = []
        rows = torch.zeros((self.experts, len(part_words([]))), dtype=torch.int64)
        for expert, its in parts.items():
            rows[expert] = torch.tensor(self._words(its, arena, kept))
        return PlacedExperts(dict(parts), rows, kept)

    def enter(
        self, number: int, parts: "Mapping[int, Sequence[ExpertPart]] | PlacedExperts"
    ) -> None:
        """Take an adapter's parts in the place of what had the number; {} lets go of it. Nothing
        may run meanwhile."""
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
        by_part = {part.part: Part(0, part.down, part.up, part.scale) for part in parts}
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
    """An adapter's parts as kernels read them.

    Attributes:
        parts: as they were given.
        rows: AdapterPair of each expert.
        tensors: what must stay where it is.
    """

    parts: Mapping[int, Sequence[ExpertPart]]
    rows: Tensor
    tensors: list[Tensor]

    @property
    def loose_bytes(self) -> int:
        """Of what lies in no arena."""
        given = [part for its in self.parts.values() for part in its]
        return self.rows.nbytes + bytes_of(m for part in given for m in (part.down, part.up))


@dataclass(frozen=True)
class ExpertSides:
    """What lies beside the experts of a layer: tables of what goes in and of what comes out, and
    which tokens have which adapter."""

    gate_up: ExpertTable
    down: ExpertTable
    tokens: AdapterTokens
