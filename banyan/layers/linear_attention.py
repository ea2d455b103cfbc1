"""Linear attention: layers that keep a matrix per head instead of keys and values.

Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next: the delta rule after a short convolution over
q, k and v. Kimi delta attention (arXiv 2510.26692): the same with a decay per key dimension.
Lightning attention (arXiv 2501.08313): a fixed decay per head, and a gated norm over the outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.layers.build import Build
from banyan.layers.cache_spec import Caching, LayerCache
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import PlainNorm, SpreadNorm
from banyan.layers.recurrent import INPUTS, MATRIX, DecayGates, ShortConv, matrix_of
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import STATE, StateFacts
from banyan.ops.stored import StoredWeight
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
        kept = {
            INPUTS: self.conv.kept,
            MATRIX: matrix_of(facts, ShardRule(0, shared), build),
        }
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
        kept = {INPUTS: self.conv.kept, MATRIX: matrix_of(facts, ShardRule(0), build)}
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


_STEP = 1.0
"""The step size of every token."""


def rates_of(layer: int, facts: StateFacts) -> Tensor:
    """Decay rate of each head, [heads] fp32: a state is multiplied by exp(−rate) per token. Powers
    of one number, like ALiBi's slopes, that decrease toward the last layer."""
    slopes = torch.full((facts.heads,), 2 ** (-8 / facts.heads), dtype=torch.float64)
    slower = 1 - layer / (facts.depth - 1 + 1e-5) + 1e-5
    return (slopes ** torch.arange(1, facts.heads + 1) * slower).float()


class LightningAttention(Caching):
    """Args:
    layer: number of the layer in the model.
    norm_eps: of the norm over the heads' outputs, unless the facts have one.
    """

    def __init__(
        self, layer: int, dim: int, facts: StateFacts, norm_eps: float, build: Build
    ) -> None:
        super().__init__()
        group, width = build.groups.attention, facts.heads * facts.value_dim
        whole, pieces = ShardRule(0, 3 * facts.value_dim), (facts.value_dim,) * 3
        first, last = ShardRule(0).span(facts.heads, group)
        self.ops, self.layer, self.heads = build.ops, layer, last - first
        self.head_dim = facts.value_dim
        self.mix = ColumnLinear(
            dim, {"": 3 * width}, {"": whole}, False, group, build, pieces={"": pieces}
        )
        rule = ShardRule(0, facts.value_dim)
        self.gate = ColumnLinear(dim, {"": width}, {"": rule}, False, group, build)
        self.norm = SpreadNorm(width, facts.value_dim, group, facts.norm_eps or norm_eps, build)
        self.out = RowLinear(width, dim, ShardRule(1, facts.value_dim), False, group, build)
        self.factor = Factors([(dim, facts.factor)], build)
        self.rates = rates_of(layer, facts)[first:last].to(build.device)
        self.zeros = torch.zeros_like(self.rates)
        here = 3 * self.heads * facts.value_dim
        self.ones = torch.ones(here, dtype=build.dtype, device=build.device)
        self.cache = LayerCache(layer, {MATRIX: matrix_of(facts, ShardRule(0), build)}, STATE)

    def forward(self, x: Tensor, angles: object, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; nothing rotates; returns [tokens, dim]."""
        ops, heads = self.ops, (self.heads, self.head_dim)
        mixed = self.mix(x)
        mixed = ops.apply_gate(self.ones.unsqueeze(0).expand_as(mixed), mixed, "silu")
        q, k, v = (part.unflatten(-1, heads) for part in mixed.chunk(3, dim=-1))
        # A step that is held at one number is the same for all tokens, whatever it is made of.
        held = mixed.narrow(1, 0, self.heads)
        moved, kept = ops.decay_gates(held, self.zeros, self.rates, _STEP, _STEP)
        states, rows = step.states(self.layer)
        out = ops.scan(q, k, v, kept, moved, None, False, states[MATRIX], rows).flatten(1)
        out = ops.apply_gate(self.norm(out), self.gate(x), "sigmoid")
        return self.factor(self.out(out))
