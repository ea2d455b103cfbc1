"""Kimi delta attention (arXiv 2510.26692): a gated delta net with a decay per key dimension, after
a short convolution over q, k and v."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import Caching, LayerCache
from banyan.layers.decay import MATRIX, matrix_of
from banyan.layers.gated_delta_net import UNIT_EPS
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.norm import PlainNorm
from banyan.layers.short_conv import INPUTS, ShortConv
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import STATE, StateFacts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

_UNBOUNDED = (0.0, float("inf"))


class KeyDecays(Layer):
    """Step bias per key dimension and logarithm of the decay rate per head."""

    def __init__(self, facts: StateFacts, build: Build) -> None:
        super().__init__()
        self.facts, self.group, self.ops = facts, build.groups.attention, build.ops
        self.rules = {"bias": ShardRule(0, facts.key_dim), "rate": ShardRule(2)}
        self.bias = self.rate = torch.empty(0, device=build.device)  # [heads here · key_dim]

    def slots(self) -> dict[str, WeightSlot]:
        heads, key_dim = self.facts.heads, self.facts.key_dim
        shapes = {"bias": (heads * key_dim,), "rate": (1, 1, heads, 1)}
        return {
            slot: WeightSlot({"": shape}, {"": self.rules[slot]}, self.group)
            for slot, shape in shapes.items()
        }

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = self.rules[slot].cut(parts[0], self.group).dense.to(self.bias)
        if slot == "bias":
            self.bias = values
        else:
            self.rate = values.exp().flatten().repeat_interleave(self.facts.key_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, heads · key_dim]; returns what is left of a state, [tokens, heads, key_dim]
        fp32."""
        kept = self.ops.decay_gates(x, self.bias, self.rate, *_UNBOUNDED)[1]
        return kept.unflatten(-1, (-1, self.facts.key_dim))


class KimiDeltaAttention(Caching):
    """
    Args:
        layer: the number under which its states are kept.
        norm_eps: of the norm of what each head gives.
    """

    def __init__(
        self, layer: int, dim: int, facts: StateFacts, norm_eps: float, build: Build
    ) -> None:
        super().__init__()
        group, head = build.groups.attention, facts.key_dim
        width, rule = facts.heads * head, ShardRule(0, head)
        self.ops, self.layer, self.facts = build.ops, layer, facts
        first, last = ShardRule(0).span(facts.heads, group)
        self.heads, here = last - first, (last - first) * head
        self.sizes = (here, here, here)
        outputs = {"k": width, "v": width, "b": facts.heads}
        rules = {"k": rule, "v": rule, "b": ShardRule(0)}
        self.query = ColumnLinear(dim, {"": width}, {"": rule}, False, group, build)
        self.mix = ColumnLinear(dim, outputs, rules, False, group, build)
        self.conv = ShortConv(
            {"q": width, "k": width, "v": width},
            {"q": rule, "k": rule, "v": rule},
            facts.conv_kernel,
            facts.has_conv_bias,
            True,
            group,
            build,
        )
        whole = {"forget": ShardRule(), "gate": ShardRule()}
        self.squeeze = ColumnLinear(
            dim, {"forget": head, "gate": head}, whole, False, Group(), build
        )
        self.forget, self.gate = (
            ColumnLinear(head, {"": width}, {"": rule}, False, group, build) for _ in range(2)
        )
        self.decays = KeyDecays(facts, build)
        self.norm = PlainNorm(head, norm_eps, build)
        self.out = RowLinear(width, dim, ShardRule(1, head), False, group, build)
        kept = {INPUTS: self.conv.kept, MATRIX: matrix_of(facts, ShardRule(0), group)}
        self.cache = LayerCache(layer, kept, STATE)
        # RMS norm times this has length one; q is scaled in addition.
        unit = torch.full((head,), head**-0.5, dtype=build.dtype, device=build.device)
        self.unit, self.scaled_unit = unit, unit * head**-0.5

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        ops, head = self.ops, self.facts.key_dim
        others, strength = self.mix(x).split((sum(self.sizes[1:]), self.heads), dim=-1)
        mixed = ops.concat([self.query(x), others])
        states, rows = step.states(self.layer)
        parts = self.conv(mixed, states[INPUTS], rows).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, head)) for part in parts)
        q = ops.rms_norm(q, self.scaled_unit, UNIT_EPS / head)
        k = ops.rms_norm(k, self.unit, UNIT_EPS / head)
        forget, gate = self.squeeze(x).chunk(2, dim=-1)
        kept = self.decays(self.forget(forget))
        out = ops.scan(q, k, v, kept, strength, None, True, states[MATRIX], rows)
        gated = ops.apply_gate(self.norm(out).flatten(1), self.gate(gate), "sigmoid")
        return self.out(gated)
