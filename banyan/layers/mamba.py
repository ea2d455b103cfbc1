"""Mamba (arXiv 2312.00752): a selective state space per channel after a short convolution. Jamba
(arXiv 2403.19887) adds norms to step sizes, keys and queries."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, ShardedAxis
from banyan.layers.decay import MATRIX
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.norm import PlainNorm
from banyan.layers.short_conv import INPUTS, ShortConv
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import STATE, StateFacts
from banyan.ops.stored import StoredWeight

_RULE = ShardRule(0)
_UNBOUNDED = (0.0, float("inf"))


class MambaRates(Layer):
    """Per channel: the bias of the step size, the logarithms of the decay rates, and the factor of
    the skip connection."""

    def __init__(self, facts: StateFacts, build: Build) -> None:
        super().__init__()
        self.shape, self.group = (facts.heads, facts.key_dim), build.groups.attention
        nothing = torch.empty(0, device=build.device)
        self.bias = self.skip = nothing  # [channels here] once filled
        self.rate = nothing  # [key_dim, channels here]
        self.zeros = nothing

    def slots(self) -> dict[str, WeightSlot]:
        flat, whole = self.shape[:1], self.shape
        shapes = {"bias": flat, "rate": whole, "skip": flat}
        return {
            slot: WeightSlot({"": shape}, {"": _RULE}, self.group) for slot, shape in shapes.items()
        }

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = _RULE.cut(parts[0], self.group).dense.to(self.bias)
        if slot == "rate":
            self.rate = values.exp().T.contiguous()
        elif slot == "skip":
            self.skip = values
        else:
            self.bias, self.zeros = values, torch.zeros_like(values)


class Mamba(Caching):
    """Args:
    layer: number of its states in the cache.
    norm_eps: of the norms of step sizes, keys and queries, if the model has them.
    """

    def __init__(
        self, layer: int, dim: int, facts: StateFacts, norm_eps: float, build: Build
    ) -> None:
        super().__init__()
        group, inner, bias = build.groups.attention, facts.heads, facts.has_bias
        self.ops, self.layer = build.ops, layer
        channels = ShardedAxis(inner, *_RULE.span(inner, group))
        outputs, rules = {"x": inner, "z": inner}, {"x": _RULE, "z": _RULE}
        self.mix = ColumnLinear(dim, outputs, rules, bias, group, build)
        self.conv = ShortConv(
            {"": inner}, {"": _RULE}, facts.conv_kernel, facts.has_conv_bias, True, group, build
        )
        self.sizes = (facts.step_rank, facts.key_dim, facts.key_dim)
        self.made = RowLinear(inner, sum(self.sizes), ShardRule(1), False, group, build)
        self.norms: list[PlainNorm] = []
        if facts.has_part_norms:
            self.step_norm, self.key_norm, self.query_norm = (
                PlainNorm(size, norm_eps, build) for size in self.sizes
            )
            self.norms = [self.step_norm, self.key_norm, self.query_norm]
        self.steps = ColumnLinear(facts.step_rank, {"": inner}, {"": _RULE}, False, group, build)
        self.rates = MambaRates(facts, build)
        self.out = RowLinear(inner, dim, ShardRule(1), bias, group, build)
        shape = (facts.key_dim, channels.last - channels.first)
        matrix = CacheTensor(shape, torch.float32, (channels,), axis=1)
        self.cache = LayerCache(layer, {INPUTS: self.conv.kept, MATRIX: matrix}, STATE)

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        ops, rates = self.ops, self.rates
        x, z = self.mix(x).chunk(2, dim=-1)  # [tokens, channels]
        states, rows = step.states(self.layer)
        v = self.conv(x, states[INPUTS], rows)
        moves, k, q = self.made(v).split(self.sizes, dim=-1)
        if self.norms:
            moves, k, q = self.step_norm(moves), self.key_norm(k), self.query_norm(q)
        moved = ops.decay_gates(self.steps(moves), rates.bias, rates.zeros, *_UNBOUNDED)[0]
        out = ops.selective_scan(q, k, v, moved, rates.rate, rates.skip, states[MATRIX], rows)
        return self.out(ops.apply_gate(out, z, "silu"))
