"""Mamba-2 (arXiv 2405.21060): a state per head with a decay per token, after a short convolution,
and a gated norm over the heads' outputs."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import Caching, LayerCache
from banyan.layers.decay import MATRIX, DecayGates, matrix_of
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import SpreadNorm
from banyan.layers.short_conv import INPUTS, ShortConv
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import STATE, StateFacts
from banyan.ops.stored import StoredWeight


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
        kept = {INPUTS: self.conv.kept, MATRIX: matrix_of(facts, ShardRule(0), group)}
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
