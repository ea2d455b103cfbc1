"""Lightning attention (arXiv 2501.08313): linear attention with a fixed decay per head and a gated
norm over the outputs."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import Caching, LayerCache
from banyan.layers.decay import MATRIX, matrix_of
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import SpreadNorm
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import STATE, StateFacts

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
        self.cache = LayerCache(layer, {MATRIX: matrix_of(facts, ShardRule(0), group)}, STATE)

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
