"""The feed-forward block: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot, single
from banyan.ops.api import Ops
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


def gate_of(activation: str, ops: Ops, limit: float = math.inf) -> Callable[[Tensor], Tensor]:
    """act(gate) · up of [tokens, gate and up] for an activation by its Hugging Face name.

    Args:
        limit: of "silu" (`ops.api.Ops.silu_and_mul`).

    Raises:
        ModelError: an unknown activation.
    """
    limited = ops.silu_and_mul if limit == math.inf else partial(ops.silu_and_mul, limit=limit)
    gates = {
        "silu": limited,
        "gelu": ops.gelu_and_mul,
        "gelu_pytorch_tanh": ops.gelu_tanh_and_mul,
    }
    if activation not in gates:
        raise ModelError(f"activation {activation!r} is not one of: {', '.join(gates)}")
    return gates[activation]


class GatedMLP(nn.Module):
    """Args:
        activation: Hugging Face name of the gate's function ("silu", "gelu", "gelu_pytorch_tanh").
        factors: on the outputs of the gate and up projections.
        limit: as for `gate_of`.

    Raises:
        ModelError: an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        activation: str,
        has_bias: bool,
        group: Group,
        build: Build,
        factors: tuple[float, float] = (1.0, 1.0),
        limit: float = math.inf,
    ) -> None:
        super().__init__()
        self.gate = gate_of(activation, build.ops, limit)
        parts = {"gate": inner, "up": inner}
        rules = {part: ShardRule(0) for part in parts}
        self.group = group
        self.gate_up: nn.Module = ColumnLinear(dim, parts, rules, has_bias, group, build)
        first, last = ShardRule(0).span(inner, group)
        self.factors = Factors([(last - first, factor) for factor in factors], build)
        self.down = RowLinear(inner, dim, ShardRule(1), has_bias, group, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_gathered(self.group.gather_rows(x))

    def of_gathered(self, x: Tensor) -> Tensor:
        """x: rows that the group has gathered already; returns this replica's rows."""
        return self.group.reduce_rows(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """`of_gathered` without the reduction over ranks."""
        return self.down.partial(self.gate(self.factors(self.gate_up(x))))


class LearnedCurve(Layer):
    """xIELU (arXiv 2411.13010): a square above zero, an exponential below, both with learned
    factors."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.device = build.device
        self.values: dict[str, float] = {}

    def slots(self) -> dict[str, WeightSlot]:
        return {name: single((1,)) for name in ("alpha_p", "alpha_n", "beta", "eps")}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        if self.device.type != "meta":
            self.values[slot] = float(parts[0].dense.float().flatten()[0])

    def forward(self, x: Tensor) -> Tensor:
        rise = math.log1p(math.exp(self.values["alpha_p"]))
        fall = self.values["beta"] + math.log1p(math.exp(self.values["alpha_n"]))
        slope, wide = self.values["beta"] * x.float(), x.float()
        below = torch.expm1(wide.clamp(max=self.values["eps"])) - wide
        return torch.where(x > 0, rise * wide * wide + slope, fall * below + slope).to(x.dtype)


class PlainMLP(nn.Module):
    """Args:
        activation: Hugging Face name of the function ("gelu_pytorch_tanh", "gelu", "quick_gelu",
            "relu", "relu2", "silu", "xielu").

    Raises:
        ModelError: an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        activation: str,
        has_bias: bool,
        group: Group,
        build: Build,
    ) -> None:
        super().__init__()
        ops = build.ops
        rules = {"": ShardRule(0)}
        first, last = rules[""].span(inner, group)
        ones = torch.ones(1, last - first, dtype=build.dtype, device=build.device)

        def curve(x: Tensor, name: str) -> Tensor:
            return ops.apply_gate(ones.expand(x.shape[0], -1), x, name)

        self.curve = LearnedCurve(build) if activation == "xielu" else None
        known: dict[str, Callable[[Tensor], Tensor]] = {
            "gelu_pytorch_tanh": ops.gelu_tanh,
            "gelu": torch.nn.functional.gelu,
            "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
            "relu": partial(curve, name="relu"),
            "relu2": lambda x: ops.apply_gate(x, x, "relu"),
            "silu": partial(curve, name="silu"),
        }
        if self.curve is None and activation not in known:
            raise ModelError(f"activation {activation!r} is not one of: {', '.join(known)}, xielu")
        self.activation = self.curve or known[activation]
        self.group = group
        self.up = ColumnLinear(dim, {"": inner}, rules, has_bias, group, build)
        self.down = RowLinear(inner, dim, ShardRule(1), has_bias, group, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_gathered(self.group.gather_rows(x))

    def of_gathered(self, x: Tensor) -> Tensor:
        """See `GatedMLP`."""
        return self.group.reduce_rows(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """See `GatedMLP`."""
        return self.down.partial(self.activation(self.up(x)))
