"""Parts of layers that keep a state: short causal convolutions, decay gates, the state matrix.

A short convolution mixes each channel's last few inputs, which are its state. `GatedConv` is LFM2's
block around one (arXiv 2511.23404).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, ShardedAxis
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import STATE, StateFacts
from banyan.ops.state_api import StateRows
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

INPUTS = "inputs"
"""Name of a convolution's state: its last conv_kernel − 1 inputs, [conv_kernel − 1, channels]
fp32."""


class ShortConv(Layer):
    """Args:
    channels: part name -> channels of the checkpoint, in stacking order.
    rules: part name -> how ranks shard them.
    has_silu: apply silu to the output.
    """

    def __init__(
        self,
        channels: Mapping[str, int],
        rules: Mapping[str, ShardRule],
        conv_kernel: int,
        has_bias: bool,
        has_silu: bool,
        group: Group,
        build: Build,
    ) -> None:
        super().__init__()
        self.channels, self.rules, self.conv_kernel = channels, rules, conv_kernel
        self.has_bias, self.has_silu = has_bias, has_silu
        self.group, self.ops = group, build.ops
        shared = [
            ShardedAxis(size, *rules[part].span(size, group)) for part, size in channels.items()
        ]
        kept = (conv_kernel - 1, sum(part.last - part.first for part in shared))
        self.kept = CacheTensor(kept, torch.float32, tuple(shared), axis=1)
        self.weight = torch.empty(0, device=build.device)  # [conv_kernel, channels] once filled
        self.bias: Tensor | None = None

    def slots(self) -> dict[str, WeightSlot]:
        shapes = {part: (size, 1, self.conv_kernel) for part, size in self.channels.items()}
        slots = {"weight": WeightSlot(shapes, self.rules, self.group)}
        if self.has_bias:
            flat = {part: (size,) for part, size in self.channels.items()}
            slots["bias"] = WeightSlot(flat, self.rules, self.group)
        return slots

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        rules = self.rules.values()
        mine = [rule.cut(part, self.group) for rule, part in zip(rules, parts, strict=True)]
        values = torch.cat([part.dense for part in mine]).to(self.weight)
        if slot == "weight":
            self.weight = values.squeeze(1).T.contiguous()
        else:
            self.bias = values

    def forward(self, x: Tensor, last_inputs: Tensor, rows: StateRows) -> Tensor:
        """x: [tokens, channels]; last_inputs: pages of the state; returns the shape of x."""
        return self.ops.short_conv(x, self.weight, self.bias, self.has_silu, last_inputs, rows)


_PARTS: tuple[str, ...] = ("b", "c", "x")


class GatedConv(Caching):
    """c · conv(b · x) between two projections."""

    def __init__(self, layer: int, dim: int, facts: StateFacts, build: Build) -> None:
        super().__init__()
        group, rule = build.groups.attention, ShardRule(0)
        self.ops, self.layer = build.ops, layer
        self.mix = ColumnLinear(
            dim,
            dict.fromkeys(_PARTS, dim),
            dict.fromkeys(_PARTS, rule),
            facts.has_bias,
            group,
            build,
        )
        self.conv = ShortConv(
            {"": dim}, {"": rule}, facts.conv_kernel, facts.has_conv_bias, False, group, build
        )
        self.out = RowLinear(dim, dim, ShardRule(1), facts.has_bias, group, build)
        self.cache = LayerCache(layer, {INPUTS: self.conv.kept}, STATE)

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        b, c, x = self.mix(x).chunk(3, dim=-1)
        kept, rows = step.states(self.layer)
        mixed = self.conv(self.ops.apply_gate(b, x, ""), kept[INPUTS], rows)
        return self.out(self.ops.apply_gate(mixed, c, ""))


MATRIX = "matrix"
"""Name of a scan's state: a matrix per head, [heads, key_dim, value_dim]."""


class DecayGates(Layer):
    """Per head: the bias of the step size, the logarithm of the decay rate, and optionally the
    factor of the skip connection.

    Args:
        rule: how ranks shard the heads.
    """

    def __init__(self, facts: StateFacts, rule: ShardRule, has_skip: bool, build: Build) -> None:
        super().__init__()
        self.heads, self.rule, self.group = facts.heads, rule, build.groups.attention
        self.bounds = (facts.least_step, facts.most_step)
        self.ops, self.has_skip = build.ops, has_skip
        self.bias = self.rate = torch.empty(0, device=build.device)  # [heads here] once filled
        self.skip: Tensor | None = None

    def slots(self) -> dict[str, WeightSlot]:
        slot = WeightSlot({"": (self.heads,)}, {"": self.rule}, self.group)
        return dict.fromkeys(("bias", "rate", *(("skip",) if self.has_skip else ())), slot)

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = self.rule.cut(parts[0], self.group).dense.to(self.bias)
        if slot == "bias":
            self.bias = values
        elif slot == "rate":
            self.rate = values.exp()
        else:
            self.skip = values

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, heads]; returns step sizes and decay factors, as `ops.decay_gates`."""
        return self.ops.decay_gates(x, self.bias, self.rate, *self.bounds)


def matrix_of(facts: StateFacts, rule: ShardRule, build: Build) -> CacheTensor:
    """The cache of a state matrix per head.

    Args:
        rule: how the ranks of attention shard the heads.
    """
    heads = ShardedAxis(facts.heads, *rule.span(facts.heads, build.groups.attention))
    shape = (heads.last - heads.first, facts.key_dim, facts.value_dim)
    return CacheTensor(shape, build.state_dtype, (heads,))
