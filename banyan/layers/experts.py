"""A feed-forward block of many experts, of which each token goes through a few.

A token adds up its experts in the order of their numbers: its value depends on nothing but itself.
No token is dropped.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from banyan.config.card import ExpertFacts
from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear
from banyan.layers.mlp import GatedMLP, gate_of
from banyan.layers.slot import Layer, ShardRule, WeightSlot, single
from banyan.ops.experts_api import PackedExperts, Routing, StoredExperts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


class Router(Layer):
    """Scores of all experts for each token; every rank chooses for itself, and the same."""

    def __init__(self, dim: int, facts: ExpertFacts, build: Build) -> None:
        super().__init__()
        self.shape = (facts.count, dim)
        self.has_correction = facts.has_correction
        self.ops = build.ops
        self.rule = Routing(
            facts.per_token,
            facts.scoring,
            facts.is_normalised,
            facts.scale,
            facts.groups,
            facts.top_groups,
            facts.group_best,
        )
        self.weight = torch.empty(0, device=build.device)  # [experts, dim] fp32 once filled
        self.correction: Tensor | None = None

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": single(self.shape)}
        return slots | {"correction": single(self.shape[:1])} if self.has_correction else slots

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = parts[0].dense.to(self.weight)
        if slot == "weight":
            self.weight = values
        else:
            self.correction = values

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """returns: ids [tokens, per_token] int64, weights [tokens, per_token] fp32."""
        return self.ops.route(x, self.weight, self.correction, self.rule)


class ExpertWeights(Layer):
    """One projection of this rank's experts.

    Args:
        parts: names of what is one weight each in it, "gate" and "up", or "".
        rule: how the ranks of `build.groups.expert_ffn` share one expert.
        filled: called when the weights are here.
    """

    def __init__(
        self,
        count: int,
        shape: tuple[int, int],
        parts: tuple[str, ...],
        rule: ShardRule,
        build: Build,
        filled: Callable[[], None],
    ) -> None:
        super().__init__()
        self.mine = range(*ShardRule(0).span(count, build.groups.experts))
        self.count, self.shape, self.parts, self.rule = count, shape, parts, rule
        self.group = build.groups.expert_ffn
        self.filled = filled
        self.weights: list[StoredWeight] = []
        """This rank's share of each part of each expert; none once they are packed."""

    def slots(self) -> dict[str, WeightSlot]:
        names = self._names(self.mine)
        others = self._names(e for e in range(self.count) if e not in self.mine)
        shapes, rules = dict.fromkeys(names, self.shape), dict.fromkeys(names, self.rule)
        return {"weight": WeightSlot(shapes, rules, self.group, elsewhere=frozenset(others))}

    def _names(self, experts: Iterable[int]) -> list[str]:
        return [f"{part}{expert}" for expert in experts for part in self.parts]

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.weights = [self.rule.cut(part, self.group) for part in parts]
        self.filled()

    def taken(self) -> list[StoredWeight]:
        weights, self.weights = self.weights, []
        return weights


class Experts(nn.Module):
    """
    Args:
        activation: as for GatedMLP.
    """

    def __init__(self, dim: int, facts: ExpertFacts, activation: str, build: Build) -> None:
        super().__init__()
        gate_of(activation, build.ops)
        self.activation = activation
        self.ops = build.ops
        inner, filled = facts.inner, self._pack
        parts = ("gate", "up")
        self.gate_up = ExpertWeights(facts.count, (inner, dim), parts, ShardRule(0), build, filled)
        self.down = ExpertWeights(facts.count, (dim, inner), ("",), ShardRule(1), build, filled)
        self.groups = (build.groups.experts, build.groups.expert_ffn)
        self.packed: PackedExperts | None = None

    def _pack(self) -> None:
        if not self.gate_up.weights or not self.down.weights:
            return
        gate_up, down = self.gate_up.taken(), self.down.taken()
        gate, up = tuple(gate_up[0::2]), tuple(gate_up[1::2])
        first = self.gate_up.mine.start
        stored = StoredExperts(first, gate, up, tuple(down), self.activation)
        self.packed = self.ops.pack_experts(stored)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [tokens, dim], of all replicas that share the experts; ids, weights: of the router;
        returns this replica's [tokens, dim]."""
        assert self.packed is not None
        out = self.packed(x, ids, weights)
        for group in self.groups:
            out = group.reduce_rows(out)
        return out


class ExpertBlock(nn.Module):
    """Router, experts, and the block beside them that every token goes through."""

    def __init__(self, dim: int, facts: ExpertFacts, activation: str, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.router = Router(dim, facts, build)
        self.experts = Experts(dim, facts, activation, build)
        self.group = build.groups.ffn
        self.shared: GatedMLP | None = None
        self.shared_gate: ColumnLinear | None = None
        if facts.shared_inner:
            inner = facts.shared_inner
            self.shared = GatedMLP(dim, inner, activation, False, self.group, build)
        if facts.has_shared_gate:
            self.shared_gate = ColumnLinear(dim, {"": 1}, {"": ShardRule()}, False, Group(), build)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.group.gather_rows(x)
        routed = self.experts(rows, *self.router(rows))
        if self.shared is None:
            return routed
        shared = self.shared.of_gathered(rows)
        if self.shared_gate is not None:
            shared = self.ops.sigmoid_scale(shared, self.shared_gate(x))
        return self.ops.add(routed, shared)
