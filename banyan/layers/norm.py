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
    def __init__(self, dim: int, eps: float, build: Build, has_weight: bool = True) -> None:
        super().__init__()
        self.has_weight = has_weight
        self.dim = dim
        self.eps = eps
        self.ops = build.ops
        count = 0 if has_weight else dim
        self.weight = torch.ones(count, dtype=build.dtype, device=build.device)  # [dim] once filled

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single((self.dim,))} if self.has_weight else {}

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
        self,
        dim: int,
        eps: float,
        has_bias: bool,
        build: Build,
        turning: RotaryRows | None = None,
        has_weight: bool = True,
    ) -> None:
        """turning: rows of its input that rotate."""
        super().__init__()
        self.has_weight = has_weight
        self.dim = dim
        self.turning = turning
        self.eps = eps
        self.has_bias = has_bias
        self.ops = build.ops
        count = 0 if has_weight else dim
        self.weight = torch.ones(count, dtype=build.dtype, device=build.device)  # [dim] once filled
        self.bias: Tensor | None = None

    def slots(self) -> dict[str, WeightSlot]:
        names = ("weight",) * self.has_weight + ("bias",) * self.has_bias
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


class HeadsNorm(Layer):
    """LayerNorm of each head with weights of its own, without bias.

    Args:
        heads: of all ranks.
        here: first and last + 1 of this rank's heads.
        turning: rows of a head that rotate.
    """

    def __init__(
        self,
        heads: int,
        here: tuple[int, int],
        turning: RotaryRows,
        eps: float,
        build: Build,
    ) -> None:
        super().__init__()
        self.heads, self.here, self.turning = heads, here, turning
        self.eps, self.ops = eps, build.ops
        self.ones = torch.ones(turning.head_dim, dtype=build.dtype, device=build.device)
        self.weight = torch.empty(0, dtype=build.dtype, device=build.device)  # [1, width] filled

    def slots(self) -> dict[str, WeightSlot]:
        names = [str(head) for head in range(self.heads)]
        shapes = dict.fromkeys(names, (self.turning.head_dim,))
        rules = dict.fromkeys(names, ShardRule())
        return {"weight": WeightSlot(shapes, rules, turning=dict.fromkeys(names, self.turning))}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        mine = [part.dense.to(self.weight) for part in parts[slice(*self.here)]]
        self.weight = torch.cat(mine).unsqueeze(0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, heads here, head_dim]; returns the same shape."""
        normed = self.ops.layer_norm(x, self.ones, None, self.eps).flatten(1)
        scaled = self.ops.apply_gate(normed, self.weight.expand(normed.shape[0], -1), "")
        return scaled.view(x.shape)


class ResidualSum:
    """The residual stream without a norm."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `ResidualNorm`."""
        total = x if residual is None else self.ops.add(x, residual)
        return total, total
