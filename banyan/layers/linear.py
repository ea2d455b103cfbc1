"""Linear layers, replicated or sharded over ranks. `PackedLinear` hides kernels and storage."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot, single
from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import STORAGE_TYPES, StoredWeight, stack
from banyan.parallel.groups import Group


class ColumnLinear(Layer):
    """A projection whose outputs are sharded: each rank computes its own.

    Args:
        outputs: part name -> outputs in the checkpoint, in stacking order ("" for one part).
        rules: part name -> how ranks shard the outputs.
        group: the ranks that shard them.
        turning: part name -> rows that the rotary embedding rotates.
        pieces: part name -> widths that each head consists of. The outputs are reordered: the first
            pieces of all heads, then the second ones, so that each can be used alone.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        rules: Mapping[str, ShardRule],
        has_bias: bool,
        group: Group,
        build: Build,
        turning: Mapping[str, RotaryRows] | None = None,
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
    """A projection whose inputs are sharded; partial sums are added over the ranks.

    With DP attention it may receive the rows of several replicas and returns this one's
    (`Group.gather_rows`).
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
        """This rank's partial sums."""
        assert self.weight is not None
        bias = self.bias if self.group.rank == 0 else None  # partial sums: it is added once
        return self.weight(x, bias)


class SideBySide:
    """Several packed weights whose outputs are concatenated."""

    def __init__(self, packed: list[PackedLinear], widths: list[int], ops: Ops) -> None:
        self.packed = packed
        self.widths = widths
        self.ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = [None] * len(self.packed) if bias is None else bias.split(self.widths)
        outs = [weight(x, part) for weight, part in zip(self.packed, biases, strict=True)]
        return self.ops.concat(outs)


def pack(parts: list[StoredWeight], ops: Ops) -> PackedLinear:
    """Pack the parts [out of the part, in], stacked in this order, into the kernel's form.

    Parts of different types (a file may store v in a finer type than q and k) stay separate if
    their kernels use blocks, as stacking would mean unpacking.
    """
    if all(STORAGE_TYPES[part.type].is_float for part in parts):
        return ops.pack_linear(stack(parts))
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.type)]
    packed = [ops.pack_linear(stack(run)) for run in runs]
    widths = [sum(part.shape[0] for part in run) for run in runs]
    return packed[0] if len(packed) == 1 else SideBySide(packed, widths, ops)


class Factors:
    """Constant factors on the outputs of a projection, one per part.

    Args:
        parts: (width, factor) of each part. Factors that are all one cost nothing.
    """

    def __init__(self, parts: Sequence[tuple[int, float]], build: Build) -> None:
        self.ops = build.ops
        self.values: Tensor | None = None
        if any(factor != 1.0 for _, factor in parts):
            values = [factor for width, factor in parts for _ in range(width)]
            self.values = torch.tensor(values, dtype=build.dtype, device=build.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, sum of the widths]; returns the same shape."""
        if self.values is None:
            return x
        return self.ops.apply_gate(x, self.values.unsqueeze(0).expand(x.shape[0], -1), "")
