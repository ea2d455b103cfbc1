"""What layers with decaying states have in common: the gates of decay, and the name of a state."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Shared
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import StateFacts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

MATRIX = "matrix"
"""Name of what a scan keeps: a matrix per head, [heads, key_dim, value_dim] fp32."""


class DecayGates(Layer):
    """A number per head in each slot: the bias of a token's step, the logarithm of how quickly the
    head forgets, and, where there is one, its factor on what passes by the state.

    Args:
        rule: how ranks share the heads.
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
        """x: [tokens, heads]; returns step and what is left of a state, as `ops.decay_gates`."""
        return self.ops.decay_gates(x, self.bias, self.rate, *self.bounds)


def matrix_of(facts: StateFacts, rule: ShardRule, group: Group) -> CacheTensor:
    """
    Args:
        rule: how the ranks of the group share the heads.
    """
    heads = Shared(facts.heads, *rule.span(facts.heads, group))
    shape = (heads.last - heads.first, facts.key_dim, facts.value_dim)
    return CacheTensor(shape, torch.float32, (heads,))
