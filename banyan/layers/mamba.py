"""Mamba (arXiv 2312.00752): a selective state space per channel after a short convolution; Jamba
(arXiv 2403.19887) adds norms to step sizes, keys and queries. Mamba-2 (arXiv 2405.21060): a state
per head with a decay per token, and a gated norm over the heads' outputs."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, ShardedAxis
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import PlainNorm, SpreadNorm
from banyan.layers.recurrent import INPUTS, MATRIX, DecayGates, ShortConv, matrix_of
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
        matrix = CacheTensor(shape, build.state_dtype, (channels,), axis=1)
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


class GroupedNorm(Layer):
    """RMSNorm over each of several groups of channels.

    Args:
        dim, groups: over all ranks, which shard whole groups.
    """

    def __init__(self, dim: int, groups: int, eps: float, build: Build) -> None:
        super().__init__()
        self.dim, self.eps, self.ops = dim, eps, build.ops
        self.width, self.group = dim // groups, build.groups.attention
        self.rule = ShardRule(0, self.width)
        self.weight = torch.empty(0, dtype=build.dtype, device=build.device)  # [dim here]
        self.ones = torch.ones(self.width, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot({"": (self.dim,)}, {"": self.rule}, self.group)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.weight = self.rule.cut(parts[0], self.group).dense.to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, dim here]; returns the same shape."""
        normed = self.ops.rms_norm(x.unflatten(-1, (-1, self.width)), self.ones, self.eps)
        weight = self.weight.unsqueeze(0).expand(x.shape[0], -1)
        return self.ops.apply_gate(normed.flatten(1), weight, "")


class Mamba2(Caching):
    """Args:
    layer: number of its states in the cache.
    norm_eps: of the norm over the heads' outputs.
    """

    def __init__(
        self, layer: int, dim: int, facts: StateFacts, norm_eps: float, build: Build
    ) -> None:
        super().__init__()
        group = build.groups.attention
        heads, shared = ShardRule(0, facts.value_dim), ShardRule(0, facts.key_dim, replicate=True)
        inner, keys = facts.heads * facts.value_dim, facts.key_heads * facts.key_dim
        outputs = {"z": inner, "x": inner, "b": keys, "c": keys, "dt": facts.heads}
        rules = {"z": heads, "x": heads, "b": shared, "c": shared, "dt": ShardRule(0)}
        spans = {part: rules[part].span(size, group) for part, size in outputs.items()}
        here = {part: last - first for part, (first, last) in spans.items()}
        mixed = ("x", "b", "c")
        self.ops, self.layer, self.facts = build.ops, layer, facts
        self.sizes = (here["z"], sum(here[part] for part in mixed), here["dt"])
        self.mixed = tuple(here[part] for part in mixed)
        self.factors = Factors(list(zip(here.values(), facts.factors, strict=True)), build)
        self.factor = Factors([(dim, facts.factor)], build)
        self.mix = ColumnLinear(dim, outputs, rules, facts.has_bias, group, build)
        self.conv = ShortConv(
            {part: outputs[part] for part in mixed},
            {part: rules[part] for part in mixed},
            facts.conv_kernel,
            facts.has_conv_bias,
            True,
            group,
            build,
        )
        self.gates = DecayGates(facts, ShardRule(0), True, build)
        self.norm: SpreadNorm | GroupedNorm | None = None
        norm_eps = facts.norm_eps or norm_eps
        if facts.norm and facts.key_heads == 1:
            self.norm = SpreadNorm(inner, facts.value_dim, group, norm_eps, build)
        elif facts.norm:
            self.norm = GroupedNorm(inner, facts.key_heads, norm_eps, build)
        self.out = RowLinear(
            inner, dim, ShardRule(1, facts.value_dim), facts.has_bias, group, build
        )
        kept = {INPUTS: self.conv.kept, MATRIX: matrix_of(facts, ShardRule(0), build)}
        self.cache = LayerCache(layer, kept, STATE)

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        facts, ops = self.facts, self.ops
        z, mixed, dt = self.factors(self.mix(x)).split(self.sizes, dim=-1)
        states, rows = step.states(self.layer)
        v, k, q = self.conv(mixed, states[INPUTS], rows).split(self.mixed, dim=-1)
        q, k = (part.unflatten(-1, (-1, facts.key_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, facts.value_dim))  # [tokens, heads, value_dim]
        moved, kept = self.gates(dt)
        out = ops.scan(q, k, v, kept, moved, self.gates.skip, False, states[MATRIX], rows)
        out = out.flatten(1)
        if self.norm is not None and facts.norm == "plain":
            out = self.norm(out)
        out = ops.apply_gate(out, z, "silu")
        if self.norm is not None and facts.norm == "gated":
            out = self.norm(out)
        return self.factor(self.out(out))
