"""Parts that are shared by layers with decaying states: decay gates and the state matrix."""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, ShardedAxis
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot
from banyan.model_config.model_config import StateFacts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

MATRIX = "matrix"
"""Name of a scan's state: a matrix per head, [heads, key_dim, value_dim] fp32."""


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


def matrix_of(facts: StateFacts, rule: ShardRule, group: Group) -> CacheTensor:
    """The cache of a state matrix per head.

    Args:
        rule: how the ranks of the group shard the heads.
    """
    heads = ShardedAxis(facts.heads, *rule.span(facts.heads, group))
    shape = (heads.last - heads.first, facts.key_dim, facts.value_dim)
    return CacheTensor(shape, torch.float32, (heads,))
