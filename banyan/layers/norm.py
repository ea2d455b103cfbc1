"""RMSNorm and LayerNorm, alone or fused with the addition to the residual stream."""

from typing import Protocol

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot, single
from banyan.ops.api import Ops
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


class ResidualNorm(Protocol):
    """Adds x to the residual stream and computes the input of the next block."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, or start it: (input of the block, new residual)."""
        ...


class RMSNorm(Layer):
    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.ops = build.ops
        self.weight = torch.empty(0, dtype=build.dtype, device=build.device)  # [dim] once filled

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single((self.dim,))}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.weight = parts[0].dense.to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ResidualNorm`."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class PlainNorm(Layer):
    """RMSNorm whose stored weight is final, even if other norms of the model have an offset
    (`NameMap.norm_offset`)."""

    def __init__(self, dim: int, eps: float, build: Build) -> None:
        super().__init__()
        self.dim, self.eps, self.ops = dim, eps, build.ops
        self.weight = torch.empty(0, dtype=build.dtype, device=build.device)  # [dim] once filled

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single((self.dim,))}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.weight = parts[0].dense.to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class SpreadNorm(RMSNorm):
    """RMSNorm over a vector that is sharded over a group's ranks. With fewer units than ranks some
    ranks hold the same units; the mean of squares is unchanged.

    Args:
        dim: over all ranks, each unit counted once.
        unit: values of x that stay together.
    """

    def __init__(self, dim: int, unit: int, group: Group, eps: float, build: Build) -> None:
        super().__init__(dim, eps, build)
        self.group = group
        self.unit = unit
        self.copies = max(1, group.size * unit // dim)

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        super().fill(slot, parts)
        by_unit = self.weight.view(-1, self.unit)
        self.weight = by_unit.repeat_interleave(self.copies, dim=0).flatten()

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, width of this rank]; returns this rank's part of the normed vector."""
        width = x.shape[1]
        whole = self.group.all_gather(x, width * self.group.size)
        normed = self.ops.rms_norm(whole, self.weight, self.eps)
        return normed.narrow(1, width * self.group.rank, width)


class LayerNorm(Layer):
    def __init__(
        self, dim: int, eps: float, has_bias: bool, build: Build, turning: RotaryRows | None = None
    ) -> None:
        """turning: rows of its input that rotate."""
        super().__init__()
        self.dim = dim
        self.turning = turning
        self.eps = eps
        self.has_bias = has_bias
        self.ops = build.ops
        self.weight = torch.empty(0, dtype=build.dtype, device=build.device)  # [dim] once filled
        self.bias: Tensor | None = None

    def slots(self) -> dict[str, WeightSlot]:
        names = ("weight", "bias") if self.has_bias else ("weight",)
        turning = {} if self.turning is None else {"": self.turning}
        slot = WeightSlot({"": (self.dim,)}, {"": ShardRule()}, turning=turning)
        return dict.fromkeys(names, slot)

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = parts[0].dense.to(self.weight)
        if slot == "weight":
            self.weight = values
        else:
            self.bias = values

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ResidualNorm`."""
        total = x if residual is None else self.ops.add(x, residual)
        return self.forward(total), total


class ResidualSum:
    """The residual stream without a norm."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ResidualNorm`."""
        total = x if residual is None else self.ops.add(x, residual)
        return total, total
