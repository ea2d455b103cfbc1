"""Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next: linear attention with the delta rule, after
a short convolution over q, k and v."""

from collections.abc import Mapping

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.layers.build import Build
from banyan.layers.cache_spec import Caching, LayerCache
from banyan.layers.decay import MATRIX, DecayGates, matrix_of
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.norm import PlainNorm
from banyan.layers.short_conv import INPUTS, ShortConv
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import STATE, StateFacts
from banyan.parallel.groups import Group

UNIT_EPS = 1e-6
"""Added to the sum of squares when q and k are normalised."""


class GatedDeltaNet(Caching):
    """Args:
    layer: number of the layer in the model.
    norm_eps: of the norm over each head's output.
    """

    def __init__(
        self, layer: int, dim: int, facts: StateFacts, norm_eps: float, build: Build
    ) -> None:
        super().__init__()
        group, shared = build.groups.attention, facts.heads // facts.key_heads
        key, value = facts.key_dim, shared * facts.value_dim  # of one key head
        self.ops, self.layer, self.facts = build.ops, layer, facts
        first, last = ShardRule(0).span(facts.key_heads, group)
        self.key_heads = last - first
        keys, values = self.key_heads * key, self.key_heads * value
        self.sizes = (keys, keys, values)
        widths = {"q": key, "k": key, "v": value}
        mixed, rates = widths | {"z": value}, {"b": shared, "a": shared}
        self.mix = _of_key_heads(dim, facts, mixed, facts.is_grouped, group, build)
        self.rates = _of_key_heads(dim, facts, rates, facts.has_grouped_rates, group, build)
        self.tiles = shared if facts.is_tiled else 1
        if self.tiles > 1 and group.size > 1:
            raise ConfigError(
                f"{group.size} ranks cannot share interleaved value heads, as GGUF files of "
                f"{facts.heads} on {facts.key_heads} key heads have them",
                hint="take the model's safetensors form, or one rank",
            )
        self.conv = ShortConv(
            {part: facts.key_heads * width for part, width in widths.items()},
            {part: ShardRule(0, width) for part, width in widths.items()},
            facts.conv_kernel,
            facts.has_conv_bias,
            True,
            group,
            build,
        )
        self.gates = DecayGates(facts, ShardRule(0, shared), False, build)
        self.norm = PlainNorm(facts.value_dim, norm_eps, build)
        width = facts.key_heads * value
        self.out = RowLinear(width, dim, ShardRule(1, value), False, group, build)
        kept = {INPUTS: self.conv.kept, MATRIX: matrix_of(facts, ShardRule(0, shared), group)}
        self.cache = LayerCache(layer, kept, STATE)
        # RMS norm times this has length one; q is scaled in addition.
        unit = torch.full((key,), key**-0.5, dtype=build.dtype, device=build.device)
        self.unit, self.scaled_unit = unit, unit * key**-0.5

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        facts, ops = self.facts, self.ops
        qkv, z = self.mix(x).split((sum(self.sizes), self.sizes[2]), dim=-1)
        strength, rates = self.rates(x).chunk(2, dim=-1)
        states, rows = step.states(self.layer)
        q, k, v = self.conv(qkv, states[INPUTS], rows).split(self.sizes, dim=-1)
        eps = UNIT_EPS / facts.key_dim
        heads = (self.key_heads, facts.key_dim)
        q = ops.rms_norm(q.unflatten(-1, heads), self.scaled_unit, eps)
        k = ops.rms_norm(k.unflatten(-1, heads), self.unit, eps)
        v = v.unflatten(-1, (-1, facts.value_dim))  # [tokens, heads, value_dim]
        kept = self.gates(rates)[1]
        out = ops.scan(q, k, v, kept, strength, None, True, states[MATRIX], rows)
        out = self.norm(out)
        if self.tiles > 1:
            order = [
                at for first in range(self.tiles) for at in range(first, facts.heads, self.tiles)
            ]
            out = ops.concat([out[:, at] for at in order])
        else:
            out = out.flatten(1)
        return self.out(ops.apply_gate(out, z, "silu"))


def _of_key_heads(
    dim: int,
    facts: StateFacts,
    widths: Mapping[str, int],
    is_grouped: bool,
    group: Group,
    build: Build,
) -> ColumnLinear:
    """A projection to parts that have so many numbers for each key head, one part after another."""
    if not is_grouped:
        outputs = {part: facts.key_heads * width for part, width in widths.items()}
        rules = {part: ShardRule(0, width) for part, width in widths.items()}
        return ColumnLinear(dim, outputs, rules, False, group, build)
    pieces = tuple(widths.values())
    whole = sum(pieces)
    outputs, rules = {"": facts.key_heads * whole}, {"": ShardRule(0, whole)}
    return ColumnLinear(dim, outputs, rules, False, group, build, pieces={"": pieces})
