"""Projections, whole or shared between ranks. Kernels and storage hide behind `PackedLinear`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.pack import pack
from banyan.layers.weight_slot import Layer, ShardRule, Turning, WeightSlot, single
from banyan.ops.api import PackedLinear
from banyan.ops.stored import StoredWeight, stack
from banyan.parallel.groups import Group


class ColumnLinear(Layer):
    """A projection whose outputs are shared out: each rank computes its own.

    Args:
        outputs: part name -> outputs in the checkpoint, in stacking order ("" for one part).
        rules: part name -> how ranks share the outputs.
        group: the ranks that share them.
        turning: part name -> its rows that the rotary embedding turns.
        pieces: part name -> widths that each of its heads consists of; the first pieces of all
            heads come out first, then the second ones, so that either may be used alone.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        rules: Mapping[str, ShardRule],
        has_bias: bool,
        group: Group,
        build: Build,
        turning: Mapping[str, Turning] | None = None,
        pieces: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.rules = rules
        self.has_bias = has_bias
        self.group = group
        self.turning = turning or {}
        self.pieces = pieces or {}
        self.ops = build.ops
        self.weight: PackedLinear | None = None
        self.bias: Tensor | None = None
        self._bias_like = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        shapes = {part: (size, self.inputs) for part, size in self.outputs.items()}
        slot = WeightSlot(shapes, self.rules, self.group, self.turning, self.pieces)
        slots = {"weight": slot}
        if self.has_bias:
            shapes = {part: (size,) for part, size in self.outputs.items()}
            slots["bias"] = WeightSlot(shapes, self.rules, self.group, self.turning)
        return slots

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        rules = self.rules.values()
        mine = [rule.cut(part, self.group) for rule, part in zip(rules, parts, strict=True)]
        names = zip(self.rules, mine, strict=True)
        mine = [p.by_piece(self.pieces[name]) if name in self.pieces else p for name, p in names]
        if slot == "weight":
            self.weight = pack(mine, self.ops)
        else:
            self.bias = stack(mine).dense.to(self._bias_like)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return self.weight(x, self.bias)


class RowLinear(Layer):
    """A projection whose inputs are shared out: partial sums are added over the ranks.

    It may be given the rows of several replicas, and returns this one's (`Group.gather_rows`).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        rule: ShardRule,
        has_bias: bool,
        group: Group,
        build: Build,
    ) -> None:
        super().__init__()
        self.shape = (outputs, inputs)
        self.rule = rule
        self.has_bias = has_bias
        self.group = group
        self.ops = build.ops
        self.weight: PackedLinear | None = None
        self.bias: Tensor | None = None
        self._bias_like = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": WeightSlot({"": self.shape}, {"": self.rule}, self.group)}
        if self.has_bias:
            slots["bias"] = single(self.shape[:1])
        return slots

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        if slot == "weight":
            self.weight = pack([self.rule.cut(parts[0], self.group)], self.ops)
        else:
            self.bias = parts[0].dense.to(self._bias_like)

    def forward(self, x: Tensor) -> Tensor:
        return self.group.reduce_rows(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's sums, of inputs that are here."""
        assert self.weight is not None
        bias = self.bias if self.group.rank == 0 else None  # partial sums: it is added once
        return self.weight(x, bias)
