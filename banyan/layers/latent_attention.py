"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C).

The cache keeps one latent vector and one rotated key per token for all heads. The expansion to keys
and values is absorbed: queries are mapped into the latent space, and values are computed from the
weighted sum of latents.

The lightning indexer makes it sparse (DeepSeek-V3.2-Exp, section 2.1): small heads score which
positions a token attends to. The score of a position is Σ over heads of weight · relu(q · k).
Positive factors that are equal for all positions are left out, as they do not change the order.
Every rank computes the same choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.norm import LayerNorm, RMSNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import IndexerOutput, LatentSpec, StepInputs
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot
from banyan.model_config.model_config import LatentFacts
from banyan.ops.api import KEYS, LATENT, QUERY, SQUEEZE, IndexShape, PackedHeadLinear, PrologueShape
from banyan.ops.pages import stored_width
from banyan.ops.stored import STORAGE_TYPES, StoredWeight
from banyan.parallel.groups import Group

_WHOLE = {"": ShardRule()}


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a latent attention block over all ranks."""

    layer: int
    dim: int
    heads: int
    facts: LatentFacts
    scale: float
    norm_eps: float
    has_bias: bool = False


OnFill = Callable[[str, StoredWeight], None]
"""Called with a part of the prologue's weights, as `LatentPrologue.take`."""


class PrologueLinear(ColumnLinear):
    """A projection of one part whose weight is also passed to a fused prologue."""

    part = ""
    on_fill: OnFill | None = None

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        super().fill(slot, parts)
        if slot == "weight" and self.on_fill is not None:
            self.on_fill(self.part, self.rules[""].cut(parts[0], self.group))


class HeadExpansion(Layer):
    """The matrix from latents to keys and values (kv_b_proj), kept as two matrices per head.

    Filled with the checkpoint's [heads · (plain_dim + value_dim), rank].
    """

    on_fill: OnFill | None = None

    def __init__(self, shape: LatentShape, build: Build) -> None:
        super().__init__()
        self.group = build.groups.attention
        self.facts = shape.facts
        head = shape.facts.plain_dim + shape.facts.value_dim
        self.shape = (shape.heads * head, shape.facts.rank)
        self.rule = ShardRule(0, head)
        self.ops = build.ops
        self.into: PackedHeadLinear | None = None
        """[heads, rank, plain_dim] once filled: queries into the latent space."""
        self.back: PackedHeadLinear | None = None
        """[heads, value_dim, rank] once filled."""

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot({"": self.shape}, {"": self.rule}, self.group)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        facts, mine = self.facts, self.rule.cut(parts[0], self.group)
        heads = mine.dense.view(-1, facts.plain_dim + facts.value_dim, facts.rank)
        keys, values = heads.split([facts.plain_dim, facts.value_dim], dim=1)
        is_in_blocks = not STORAGE_TYPES[parts[0].type].is_float
        self.into, self.back = (
            self.ops.pack_head_linear(StoredWeight.from_tensor(part), is_in_blocks)
            for part in (keys.transpose(1, 2), values)
        )
        if self.on_fill is not None:
            self.on_fill(KEYS, StoredWeight.from_tensor(keys))

    def to_latent(self, q: Tensor) -> Tensor:
        """[tokens, heads, plain_dim] -> [tokens, heads, rank]"""
        assert self.into is not None
        return self.into(q)

    def to_values(self, attended: Tensor) -> Tensor:
        """[tokens, heads, rank] -> [tokens, heads, value_dim]"""
        assert self.back is not None
        return self.back(attended)


class LatentAttention(Caching):
    def __init__(self, shape: LatentShape, build: Build) -> None:
        super().__init__()
        facts, group, bias = shape.facts, build.groups.attention, shape.has_bias
        self.facts = facts
        self.ops = build.ops
        norm_eps = facts.norm_eps or shape.norm_eps
        head = facts.plain_dim + facts.rope_dim
        first, last = ShardRule(0, head).span(shape.heads * head, group)
        self.heads = (last - first) // head
        self.spec = LatentSpec(shape.layer, shape.scale, facts.index_top)
        self.indexer = Indexer(shape.dim, facts, build) if facts.index_heads else None
        self.cache = _cache(shape, build)
        self.squeeze: PrologueLinear | None = None
        if facts.query_rank:
            outputs = {"": facts.query_rank}
            self.squeeze = PrologueLinear(shape.dim, outputs, _WHOLE, bias, Group(), build)
            self.query_norm = RMSNorm(facts.query_rank, norm_eps, build)
        self.query = PrologueLinear(
            facts.query_rank or shape.dim,
            {"": shape.heads * head},
            {"": ShardRule(0, head)},
            False,
            group,
            build,
            turning={"": RotaryRows(head, facts.plain_dim, facts.rope_dim)},
            pieces={"": (facts.plain_dim, facts.rope_dim)},
        )
        kept = facts.rank + facts.rope_dim
        self.latent = PrologueLinear(
            shape.dim,
            {"": kept},
            _WHOLE,
            bias,
            Group(),
            build,
            turning={"": RotaryRows(kept, facts.rank, facts.rope_dim)},
        )
        self.latent_norm = RMSNorm(facts.rank, norm_eps, build)
        self.expansion = HeadExpansion(shape, build)
        rule = ShardRule(1, facts.value_dim)
        self.out = RowLinear(shape.heads * facts.value_dim, shape.dim, rule, bias, group, build)
        self.prologue = build.ops.open_prologue(_prologue_shape(shape, self.heads, build))
        self.is_fused = False
        """The prologue computes everything before attention and alone holds the weights for it."""
        if self.prologue is not None:
            assert self.squeeze is not None
            parts = ((SQUEEZE, self.squeeze), (QUERY, self.query), (LATENT, self.latent))
            for part, layer in parts:
                layer.part, layer.on_fill = part, self._take
            self.expansion.on_fill = self._take

    def _take(self, part: str, weight: StoredWeight) -> None:
        assert self.prologue is not None and self.squeeze is not None
        self.prologue.take(part, weight)
        self.is_fused = self.prologue.is_ready()
        if self.is_fused:  # used by the prologue only
            self.squeeze.weight = self.query.weight = self.latent.weight = None
            self.expansion.into = None

    def forward(self, x: Tensor, angles: Angles | None, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; angles: of every token's position, rope_dim / 2 of them, None without
        rotation; returns [tokens, dim]."""
        kept: tuple[Tensor, Tensor] | None = None
        if self.is_fused:
            q, turned, squeezed = self._together(x, angles, step)
        else:
            q, turned, squeezed, kept = self._one_by_one(x, angles)
        indexed = None if self.indexer is None else self.indexer(x, squeezed, angles)
        attended = step.attention.latent(self.spec, q, turned, kept, indexed)
        values = self.expansion.to_values(attended)  # [tokens, heads, value_dim]
        return self.out(values.flatten(1))

    def _together(
        self, x: Tensor, angles: Angles | None, step: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.prologue is not None
        pages, locations = step.attention.latent_pages(self.spec.layer)
        gammas = (self.query_norm.weight, self.latent_norm.weight)
        return self.prologue(x, gammas, angles, pages, locations)

    def _one_by_one(
        self, x: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Queries in the latent space, rotated queries, compressed queries; latent and key for the
        cache."""
        facts, ops = self.facts, self.ops
        squeezed = x if self.squeeze is None else self.query_norm(self.squeeze(x))
        widths = [self.heads * facts.plain_dim, self.heads * facts.rope_dim]
        plain, turned = self.query(squeezed).split(widths, dim=-1)
        plain = plain.unflatten(-1, (self.heads, facts.plain_dim))  # [tokens, heads, plain_dim]
        turned = turned.unflatten(-1, (self.heads, facts.rope_dim))
        latent, key = self.latent(x).split([facts.rank, facts.rope_dim], dim=-1)
        key = key.unsqueeze(1)
        if angles is not None:
            turned, key = ops.rotary(turned, key, *angles)
        q = self.expansion.to_latent(plain)  # [tokens, heads, rank]
        return q, turned, squeezed, (self.latent_norm(latent), key.squeeze(1))


def _prologue_shape(shape: LatentShape, heads: int, build: Build) -> PrologueShape:
    facts = shape.facts
    eps = facts.norm_eps or shape.norm_eps
    obstacles = {
        "projections have biases": shape.has_bias,
        "projections may have adapters": build.adapters is not None,
        "ranks compute shares of a step": build.groups.cp_batch is not None,
    }
    return PrologueShape(
        dim=shape.dim,
        query_rank=facts.query_rank,
        heads=heads,
        rank=facts.rank,
        plain_dim=facts.plain_dim,
        rope_dim=facts.rope_dim,
        query_eps=eps,
        latent_eps=eps,
        reads_squeezed=facts.index_heads > 0,
        obstacle=next((why for why, is_so in obstacles.items() if is_so), ""),
    )


def _cache(shape: LatentShape, build: Build) -> LayerCache:
    """One latent and one rotated key per token for all heads, replicated on every rank."""
    dtype = build.ops.cache_dtype
    widths = {"latent": shape.facts.rank, "key": shape.facts.rope_dim}
    kept = {name: CacheTensor((stored_width(w, dtype),), dtype) for name, w in widths.items()}
    if shape.facts.index_heads:
        kept |= index_cache(shape.facts, build)
    return LayerCache(shape.layer, kept)


_INDEX_EPS = 1e-6


class Indexer(nn.Module):
    def __init__(self, dim: int, facts: LatentFacts, build: Build) -> None:
        super().__init__()
        self.ops, self.heads, self.top = build.ops, facts.index_heads, facts.index_top
        self.pieces = (facts.rope_dim, facts.index_dim - facts.rope_dim)
        turning = RotaryRows(facts.index_dim, 0, facts.rope_dim)
        self.query = ColumnLinear(
            facts.query_rank,
            {"": self.heads * facts.index_dim},
            _WHOLE,
            False,
            Group(),
            build,
            turning={"": turning},
            pieces={"": self.pieces},
        )
        self.key = ColumnLinear(
            dim, {"": facts.index_dim}, _WHOLE, False, Group(), build, turning={"": turning}
        )
        self.key_norm = LayerNorm(facts.index_dim, _INDEX_EPS, True, build, turning)
        self.weigh = ColumnLinear(dim, {"": self.heads}, _WHOLE, False, Group(), build)

    def forward(self, x: Tensor, squeezed: Tensor, angles: Angles) -> IndexerOutput:
        """x: [tokens, dim]; squeezed: [tokens, query_rank], input of the query projection."""
        turned, plain = self.query(squeezed).split([self.heads * n for n in self.pieces], dim=-1)
        turned = turned.unflatten(-1, (self.heads, self.pieces[0]))
        plain = plain.unflatten(-1, (self.heads, self.pieces[1]))
        key_turned, key = self.key_norm(self.key(x)).split(list(self.pieces), dim=-1)
        turned, key_turned = self.ops.rotary(turned, key_turned.unsqueeze(1), *angles)
        return IndexerOutput(plain, turned, self.weigh(x), key, key_turned.squeeze(1))


def index_shape(facts: LatentFacts) -> IndexShape:
    widths = (facts.index_dim, facts.index_top, facts.rank, facts.rope_dim)
    return IndexShape(facts.index_heads, *widths)


def index_cache(facts: LatentFacts, build: Build) -> dict[str, CacheTensor]:
    """The indexer's keys in the pages: one per token, in two parts or whole."""
    dtype = build.ops.cache_dtype
    if build.ops.joins_index(index_shape(facts)):
        return {"index": CacheTensor((facts.index_dim,), dtype)}
    widths = {"index": facts.index_dim - facts.rope_dim, "index_turned": facts.rope_dim}
    return {name: CacheTensor((stored_width(n, dtype),), dtype) for name, n in widths.items()}
