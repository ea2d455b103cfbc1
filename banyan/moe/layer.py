"""The MoE layer: router, experts, shared experts, and the all-to-all of fixed size.

A token's experts are summed in the order of their numbers, so its result does not depend on the
batch. No token is dropped.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear
from banyan.layers.mlp import GatedMLP, PlainMLP, gate_of
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot, single
from banyan.lora.targets import AdaptedRouter
from banyan.model_config.model_config import ExpertFacts
from banyan.ops.experts_api import Clamp, ExchangingExperts, PackedExperts, Routing, StoredExperts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group, Groups


class Router(Layer):
    """Scores all experts for each token. Every rank computes the same choice."""

    def __init__(self, dim: int, facts: ExpertFacts, build: Build, layer: int = 0) -> None:
        super().__init__()
        self.layer, self.watch = layer, build.watch
        self.shape = (facts.count, dim)
        self.has_correction, self.has_bias = facts.has_correction, facts.has_bias
        self.ops = build.ops
        self.rule = Routing(
            facts.per_token,
            facts.scoring,
            facts.is_normalised,
            facts.scale,
            facts.groups,
            facts.top_groups,
            facts.group_best,
            facts.jitter,
        )
        self.weight = torch.empty(0, device=build.device)  # [experts, dim] fp32 once filled
        self.correction: Tensor | None = None
        self.bias: Tensor | None = None
        self.adapted: AdaptedRouter | None = None

    def slots(self) -> dict[str, WeightSlot]:
        optional = {"correction": self.has_correction, "bias": self.has_bias}
        vectors = {name: single(self.shape[:1]) for name, has_it in optional.items() if has_it}
        return {"weight": single(self.shape)} | vectors

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = parts[0].dense.to(self.weight)
        setattr(self, slot, values)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """returns: ids [tokens, per_token] int64, weights [tokens, per_token] fp32."""
        ids, weights = self.choose(x)
        self.report(ids)
        return ids, weights

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As forward, without reporting; for rows of one replica among others."""
        chosen = (x, self.weight, self.correction, self.rule, self.bias)
        if self.adapted is None:
            return self.ops.route(*chosen)
        return self.ops.route(*chosen, self.adapted.now())

    def scaled(self, x: Tensor) -> Tensor:
        """x times the score of its one expert, [tokens, dim]; the router's weights are then 1."""
        plain = replace(self.rule, is_normalised=False)
        _, score = self.ops.route(x, self.weight, self.correction, plain, self.bias)
        gate, dim = score.to(x.dtype), x.shape[1]
        while (width := gate.shape[1]) < dim:
            gate = self.ops.concat([gate, gate[:, : dim - width]])
        return self.ops.apply_gate(x, gate, "")

    def report(self, ids: Tensor) -> None:
        """ids: choices of the rows of all replicas."""
        if self.watch is not None:
            self.watch.chose(self.layer, ids)


class ExpertWeights(Layer):
    """One projection of this rank's experts.

    Args:
        parts: names of the separate weights in it, "gate" and "up", or "".
        mine: experts of this rank, one per place; an expert may occur twice.
        rule: how the ranks of `build.groups.expert_ffn` shard one expert.
        has_bias: each part has a bias.
        filled: called when the weights, or the biases, are loaded.
    """

    def __init__(
        self,
        count: int,
        mine: Sequence[int],
        shape: tuple[int, int],
        parts: tuple[str, ...],
        rule: ShardRule,
        has_bias: bool,
        build: Build,
        filled: Callable[[], None],
    ) -> None:
        super().__init__()
        self.mine = mine
        self.count, self.shape, self.parts, self.rule = count, shape, parts, rule
        self.group = build.groups.expert_ffn
        self.has_bias, self.filled = has_bias, filled
        self.bias_rule = rule if rule.dim == 0 else ShardRule()
        self.weights: list[StoredWeight] = []
        """This rank's share of each part of each expert; empty after packing."""
        self.biases: Tensor | None = None  # [experts · parts, outputs here] fp32

    def slots(self) -> dict[str, WeightSlot]:
        names = self._names(dict.fromkeys(self.mine))
        others = self._names(e for e in range(self.count) if e not in self.mine)
        kinds: dict[str, tuple[tuple[int, ...], ShardRule]] = {"weight": (self.shape, self.rule)}
        if self.has_bias:
            kinds["bias"] = (self.shape[:1], self.bias_rule)
        return {
            slot: WeightSlot(
                dict.fromkeys(names, shape),
                dict.fromkeys(names, rule),
                self.group,
                elsewhere=frozenset(others),
            )
            for slot, (shape, rule) in kinds.items()
        }

    def _names(self, experts: Iterable[int]) -> list[str]:
        return [f"{part}{expert}" for expert in experts for part in self.parts]

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        parts = self._of_each_place(parts)
        if slot == "weight":
            self.weights = [self.rule.cut(part, self.group) for part in parts]
        else:
            mine = [self.bias_rule.cut(part, self.group).dense.float() for part in parts]
            self.biases = torch.stack(mine)
            if self.rule.dim == 1 and self.group.rank:  # partial sums: it is added once
                self.biases = torch.zeros_like(self.biases)
        self.filled()

    def _of_each_place(self, parts: list[StoredWeight]) -> list[StoredWeight]:
        there = {expert: at for at, expert in enumerate(dict.fromkeys(self.mine))}
        n = len(self.parts)
        return [parts[there[e] * n + k] for e in self.mine for k in range(n)]

    @property
    def is_filled(self) -> bool:
        return bool(self.weights) and (self.biases is not None or not self.has_bias)

    def taken(self) -> list[StoredWeight]:
        weights, self.weights = self.weights, []
        return weights


class Experts(nn.Module):
    """The routed experts of a layer.

    Args:
        activation: as for GatedMLP.
        layer: its number in the model.
    """

    def __init__(
        self, dim: int, facts: ExpertFacts, activation: str, build: Build, layer: int = 0
    ) -> None:
        super().__init__()
        self.layer, self.places = layer, build.places
        if facts.is_gated:
            gate_of(activation, build.ops)
        self.activation, self.is_gated = activation, facts.is_gated
        self.ops = build.ops
        inner, filled = facts.inner, self._pack
        limit = facts.limit_of(layer)
        self.clamp = Clamp(limit, facts.alpha) if limit else None
        parts = ("gate", "up") if facts.is_gated else ("up",)
        count, has_bias = facts.count, facts.has_bias
        mine: Sequence[int] = range(*ShardRule(0).span(count, build.groups.experts))
        self.first = mine[0]
        if self.places is not None:
            mine, self.first = self.places.mine(layer), self.places.first
        self.gate_up = ExpertWeights(
            count, mine, (inner, dim), parts, ShardRule(0), has_bias, build, filled
        )
        self.down = ExpertWeights(
            count, mine, (dim, inner), ("",), ShardRule(1), has_bias, build, filled
        )
        self.groups = (build.groups.experts, build.groups.expert_ffn)
        self.of_rank = len(mine)
        self.packed: PackedExperts | None = None

    def _pack(self) -> None:
        if not self.gate_up.is_filled or not self.down.is_filled:
            return
        gate_up, down = self.gate_up.taken(), self.down.taken()
        gate, up = tuple(gate_up[0::2]), tuple(gate_up[1::2])
        if not self.is_gated:
            gate, up = (), tuple(gate_up)
        biases, of_inner, of_outer = None, self.gate_up.biases, self.down.biases
        if of_inner is not None and of_outer is not None:
            biases = (of_inner[0::2], of_inner[1::2], of_outer)
        self.packed = self.ops.pack_experts(
            StoredExperts(
                self.first,
                gate,
                up,
                tuple(down),
                self.activation,
                biases,
                self.clamp,
                total=self.gate_up.count if self.places is None else self.places.total,
            )
        )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [tokens, dim], of all replicas that share the experts; ids, weights: from the router;
        returns this replica's [tokens, dim]."""
        assert self.packed is not None
        out = self.packed(x, ids, weights)
        for group in self.groups:
            out = group.reduce_rows(out)
        return out

    def anywhere(self, x: Tensor, ids: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """`forward` for experts that were moved or have copies; the result is bit-identical. Each
        (token, expert) pair is returned by the rank that computed it, and all are summed here.

        ids: choices of the rows of all replicas; own: ids and weights of this one's.
        """
        assert self.packed is not None and self.places is not None
        places, table = self.places, self.places.tables[self.layer]
        if places.is_fake:
            ids = self.ops.place_experts(ids, table, "even")
            own = (ids, own[1])
        pairs = self.packed.apart(x, self.ops.place_experts(ids, table, places.dispatch))
        for group in self.groups:
            pairs = group.reduce_rows(pairs)
        return self.ops.combine_experts(pairs, *own, places.home)

    def placed(self, ids: Tensor) -> Tensor:
        """The places of chosen experts; the same numbers if experts are in their order."""
        if self.places is None:
            return ids
        table = self.places.tables[self.layer]
        if self.places.is_fake:
            ids = self.ops.place_experts(ids, table, "even")
        return self.ops.place_experts(ids, table, self.places.dispatch)

    def of_sent(self, x: Tensor, ids: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """`forward` and `anywhere`, bit-identical, with rows sent to the ranks of their experts
        only.

        x: this replica's [tokens, dim]; ids: choices of the rows of all replicas; own: ids and
        weights of this one's.
        """
        assert self.packed is not None
        group, places = self.groups[0], self.places
        if places is None:
            rows = group.dispatch_rows(x, ids, self.of_rank)
            out = self.packed(rows, ids, group.gather_rows(own[1]))
            return group.combine_rows(out, ids, self.of_rank)
        table = places.tables[self.layer]
        if places.is_fake:
            ids = self.ops.place_experts(ids, table, "even")
            own = (ids, own[1])
        at = self.ops.place_experts(ids, table, places.dispatch)
        pairs = self.packed.apart(group.dispatch_rows(x, at, self.of_rank), at)
        pairs = group.combine_rows(pairs, at, self.of_rank, is_apart=True)
        return self.ops.combine_experts(pairs, *own, places.home)


class ExpertBlock(nn.Module):
    """Router, routed experts and shared experts.

    Args:
        layer: its number in the model.
        limit: of the shared experts, as for `GatedMLP`.
    """

    def __init__(
        self,
        dim: int,
        facts: ExpertFacts,
        activation: str,
        build: Build,
        layer: int = 0,
        limit: float = math.inf,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.router = Router(dim, facts, build, layer)
        self.experts = Experts(facts.latent or dim, facts, activation, build, layer)
        assert facts.per_token == 1 or not facts.scales_input
        self.scales_input = facts.scales_input
        self.into = self.back = None
        if facts.latent:
            whole, latent = {"": ShardRule()}, facts.latent
            of_rows = Group() if build.sends_rows else build.groups.ffn
            self.into = ColumnLinear(dim, {"": latent}, whole, False, of_rows, build)
            self.back = ColumnLinear(latent, {"": dim}, whole, False, Group(), build)
        self.group = build.groups.ffn
        self.sends_rows = build.sends_rows
        self.exchange = ExpertExchange.of(build)
        self.side_stream = build.side_stream
        self.shared: GatedMLP | PlainMLP | None = None
        self.shared_gate: ColumnLinear | None = None
        if facts.shared_inner:
            inner = facts.shared_inner
            sizes = (dim, inner, activation, False, self.group, build)
            gated = facts.is_gated
            self.shared = GatedMLP(*sizes, limit=limit) if gated else PlainMLP(*sizes)
        if facts.has_shared_gate:
            self.shared_gate = ColumnLinear(dim, {"": 1}, {"": ShardRule()}, False, Group(), build)

    def forward(self, x: Tensor) -> Tensor:
        is_for_all = self.shared is not None or not self.sends_rows
        rows = self.group.gather_rows(x) if is_for_all else x
        if self.shared is None:
            return self._of_experts(x, rows)
        routed, shared = self._with_shared_experts(x, rows, self.shared)
        if self.shared_gate is not None:
            shared = self.ops.sigmoid_scale(shared, self.shared_gate(x))
        return self.ops.add(routed, shared)

    def _of_experts(self, x: Tensor, rows: Tensor) -> Tensor:
        routed = self._sent(x) if self.sends_rows else self._routed(x, rows)
        return routed if self.back is None else self.back(routed)

    def _with_shared_experts(
        self, x: Tensor, rows: Tensor, shared: "GatedMLP | PlainMLP"
    ) -> tuple[Tensor, Tensor]:
        """Compute routed and shared experts, in parallel if there is a side stream. The all-reduce
        comes after both, because a group runs one collective at a time."""
        stream = self.side_stream
        if stream is None:
            return self._of_experts(x, rows), shared.of_gathered(rows)
        parts = list[Tensor]()
        done = stream.run(lambda: parts.append(shared.partial(rows)), stream.record_event())
        routed = self._of_experts(x, rows)
        stream.wait(done)
        return routed, self.group.reduce_rows(parts[0])

    def _routed(self, x: Tensor, rows: Tensor) -> Tensor:
        ids, weights = self.router(rows)
        inputs = self._inputs(rows)
        if self.experts.places is None:
            return self.experts(inputs, ids, weights)
        own = (ids, weights) if rows is x else self.router.choose(x)
        return self.experts.anywhere(inputs, ids, own)

    def _sent(self, x: Tensor) -> Tensor:
        own = self.router.choose(x)
        if self.exchange is not None and self.exchange.holds(len(x)):
            if self.router.watch is not None:
                self.router.report(self.group.gather_rows(own[0]))
            inputs = self._inputs(x)
            assert self.experts.packed is not None
            packed = cast(ExchangingExperts, self.experts.packed)
            return self.exchange(packed, inputs, self.experts.placed(own[0]), own[1])
        ids = self.group.gather_rows(own[0])
        self.router.report(ids)
        return self.experts.of_sent(self._inputs(x), ids, own)

    def _inputs(self, x: Tensor) -> Tensor:
        """The rows that the routed experts read."""
        x = self.router.scaled(x) if self.scales_input else x
        return x if self.into is None else self.into(x)


class ExpertExchange:
    """All-to-all of a fixed size by the device's own operators. Ranks exchange no counts, so the
    host does not wait and steps can be captured.

    Args:
        most: tokens of a rank in one exchange.
        has_rounds: more tokens are sent in several exchanges.
    """

    def __init__(self, groups: Groups, most: int, has_rounds: bool) -> None:
        self._has_rounds = has_rounds
        self._rows, self._alike = groups.ffn, groups.attention
        self._ranks, self._most = groups.exchange.ranks, most

    @classmethod
    def of(cls, build: Build) -> "ExpertExchange | None":
        is_there = build.sends_rows and build.exchanged
        return cls(build.groups, build.exchanged, build.is_fused) if is_there else None

    def _share(self, rows: int) -> int:
        """Rows that each rank contributes to the step; ranks with the same rows divide them."""
        return -(-self._rows.most_rows(rows) // self._alike.size)

    def holds(self, rows: int) -> bool:
        """Whether a step fits; the same on all ranks. rows: of this replica."""
        return self._has_rounds or self._share(rows) <= self._most

    def __call__(
        self, packed: ExchangingExperts, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """x: [tokens, dim], of this replica; ids, weights: from the router; returns [tokens,
        dim]."""
        rows, share, alike = len(x), self._share(len(x)), self._alike
        first, end, most = alike.rank * share, (alike.rank + 1) * share, self._most
        parts = list[Tensor]()
        for at in range(first, end, most):
            mine, count = slice(at, min(at + most, end)), min(most, end - at)
            given = (x[mine], ids[mine], weights[mine])
            parts.append(packed.exchanged(*given, self._ranks, count))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = alike.all_gather(out.reshape(1, -1), alike.size * out.numel())
        return whole.view(-1, x.shape[1])[:rows]
