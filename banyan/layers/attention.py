"""The attention block: one projection to q, k and v, rotation, attention over pages, and the output
projection."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, ShardedAxis
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import HeadsNorm, LayerNorm, RMSNorm, SpreadNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import AttentionSpec, StepInputs
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot
from banyan.model_config.model_config import ALIBI_DIMS, FULL, WINDOW
from banyan.ops.pages import stored_width
from banyan.ops.stored import StoredWeight


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention block over all ranks; other fields as in AttentionSpec.

    Attributes:
        rotary_dim: leading dimensions of a head that rotate; 0 = all.
        qk_norm: as `Family.qk_norm`.
        has_sinks: each head has a learned attention sink.
        is_gated: the output of a head is scaled by the sigmoid of a gate that is projected with q.
        has_head_gates: it is scaled by the sigmoid of one number per head.
        query_rank: width of the low-rank query projection, which is normed; 0 = none. It is
            replicated on every rank (multi-matrix factorisation, Step-3, arXiv 2507.19427).
        has_wide_gates: it is scaled by the sigmoid of a number per dimension.
        alibi: factor on ALiBi's slopes; 0 = none.
        qkv_limit: clamp of q, k and v after their projection; 0 = none.
        factor: on the output of the block.
        reads: input width; 0 = `dim`.
    """

    layer: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_bias: bool = False
    has_output_bias: bool = False
    qk_norm: str = ""
    norm_eps: float = 0.0
    rotary_dim: int = 0
    has_sinks: bool = False
    is_gated: bool = False
    has_head_gates: bool = False
    has_wide_gates: bool = False
    query_rank: int = 0
    alibi: float = 0.0
    qkv_limit: float = 0.0
    factor: float = 1.0
    reads: int = 0


class Sinks(Layer):
    """An attention sink per head: a logit in the softmax without a value (gpt-oss)."""

    def __init__(self, heads: int, build: Build) -> None:
        super().__init__()
        self.heads, self.group = heads, build.groups.attention
        self.logits = torch.empty(0, dtype=torch.float32, device=build.device)  # [heads here]

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot({"": (self.heads,)}, {"": ShardRule(0)}, self.group)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.logits = ShardRule(0).cut(parts[0], self.group).dense.to(self.logits)


_HIGH = 256.0
"""ALiBi's positions are stored as multiples of this and a rest: both are exact in bfloat16."""


class Alibi:
    """Attention logits that fall with distance (ALiBi, arXiv 2108.12409), as two more dimensions of
    q and k.

    slope · (key position − query position) differs from slope · key position by a number that all
    keys of a query share, which the softmax ignores. So a head's query ends in its slope, and every
    key in its position.

    Args:
        heads: of all ranks.
        here: first and last + 1 of this rank's heads.
        scale: of attention logits.
        factor: on the slopes.
    """

    def __init__(
        self, heads: int, here: tuple[int, int], scale: float, factor: float, build: Build
    ) -> None:
        whole = 2 ** math.floor(math.log2(heads))
        exponents = [8 * (n + 1) / whole for n in range(whole)]
        exponents += [8 * (n + 0.5) / whole for n in range(heads - whole)]
        slopes = [factor / scale * 2.0**-each for each in exponents[slice(*here)]]
        values = [[slope * _HIGH, slope] for slope in slopes]
        self.slopes = torch.tensor(values, dtype=build.dtype, device=build.device)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: [tokens, heads or kv_heads, head_dim]; returns them two numbers wider."""
        tokens, kv_heads = k.shape[:2]
        high = positions.div(_HIGH, rounding_mode="floor")
        places = torch.stack([high, positions - high * _HIGH], dim=1).to(k).unsqueeze(1)
        return (
            torch.cat([q, self.slopes.expand(tokens, -1, -1)], dim=-1),
            torch.cat([k, places.expand(-1, kv_heads, -1)], dim=-1),
            torch.nn.functional.pad(v, (0, ALIBI_DIMS)),
        )


class Attention(Caching):
    def __init__(self, shape: AttentionShape, build: Build) -> None:
        super().__init__()
        group = build.groups.attention
        whole, width = ShardRule(0, shape.head_dim), shape.heads * shape.head_dim
        shared = ShardRule(0, shape.head_dim, replicate=True)
        kv_width = shape.kv_heads * shape.head_dim
        gates = 2 if shape.is_gated else 1  # a head of q, followed by its gate
        outputs = {"q": gates * width, "k": kv_width, "v": kv_width}
        of_query = ShardRule(0, gates * shape.head_dim)
        if shape.query_rank:
            outputs["q"], of_query = shape.query_rank, ShardRule()
        rules = {"q": of_query, "k": shared, "v": shared}
        first, last = whole.span(width, group)
        first_kv, last_kv = shared.span(kv_width, group)
        self.ops = build.ops
        mine, mine_kv = last - first, last_kv - first_kv
        self.sizes = (shape.query_rank or mine, mine_kv, mine_kv)
        self.spec = AttentionSpec(
            layer=shape.layer,
            heads=mine // shape.head_dim,
            kv_heads=mine_kv // shape.head_dim,
            head_dim=shape.head_dim + (ALIBI_DIMS if shape.alibi else 0),
            scale=shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            unit=build.kv_units[shape.layer] if build.kv_units else 1.0,
        )
        self.cache = paged_cache(self.spec, build, shape.kv_heads)
        self.head_dim, self.qkv_limit = shape.head_dim, shape.qkv_limit
        self.alibi: Alibi | None = None
        if shape.alibi:
            here = (first // shape.head_dim, last // shape.head_dim)
            self.alibi = Alibi(shape.heads, here, shape.scale, shape.alibi, build)
        self.qk_norm = shape.qk_norm
        turning = RotaryRows(shape.head_dim, 0, shape.rotary_dim or shape.head_dim)
        if shape.qk_norm:
            self.q_norm = _norm_of(shape, (shape.heads, first, last), turning, build)
            self.k_norm = _norm_of(shape, (shape.kv_heads, first_kv, last_kv), turning, build)
        self.qkv: nn.Module = ColumnLinear(
            shape.reads or shape.dim,
            outputs,
            rules,
            shape.has_bias,
            group,
            build,
            turning={"k": turning} if shape.query_rank else {"q": turning, "k": turning},
            pieces={"q": (shape.head_dim,) * 2} if shape.is_gated else None,
        )
        self.query: nn.Module | None = None
        if shape.query_rank:
            self.query_norm = RMSNorm(shape.query_rank, shape.norm_eps, build)
            heads = (shape.query_rank, {"": width}, {"": whole}, False, group, build)
            self.query = ColumnLinear(*heads, turning={"": turning})
        self.is_gated = shape.is_gated
        self.wide_gates: nn.Module | None = None
        if shape.has_wide_gates:
            self.wide_gates = ColumnLinear(shape.dim, {"": width}, {"": whole}, False, group, build)
        self.head_gates: nn.Module | None = None
        if shape.has_head_gates:
            of_heads = (shape.dim, {"": shape.heads}, {"": ShardRule(0)}, False, group, build)
            self.head_gates = ColumnLinear(*of_heads)
        self.sinks = Sinks(shape.heads, build) if shape.has_sinks else None
        self.factor = Factors([(shape.dim, shape.factor)], build)
        out_rule = ShardRule(1, shape.head_dim)
        self.out = RowLinear(width, shape.dim, out_rule, shape.has_output_bias, group, build)

    def forward(self, x: Tensor, angles: Angles | None, step: StepInputs) -> Tensor:
        """x: [tokens, reads]; angles: cos, sin [tokens, pairs] fp32, None without rotation;
        returns [tokens, dim]."""
        q, k, v, gate = self._project(x, angles)
        sinks = None if self.sinks is None else self.sinks.logits
        if self.alibi is not None:
            q, k, v = self.alibi.extend(q, k, v, step.positions)
        heads = step.attention(self.spec, q, k, v, sinks)
        attended = (heads if self.alibi is None else heads[..., : self.head_dim]).flatten(1)
        for each in gate:
            attended = self.ops.apply_gate(attended, each, "sigmoid")
        if self.wide_gates is not None:
            attended = self.ops.apply_gate(attended, self.wide_gates(x), "sigmoid")
        if self.head_gates is not None:
            attended = self.ops.sigmoid_scale(attended, self.head_gates(x))
        return self.factor(self.out(attended))

    def keep(self, x: Tensor, angles: Angles | None, step: StepInputs) -> None:
        """Write keys and values without attending; for steps that only fill the cache. As
        `forward`."""
        q, k, v, _ = self._project(x, angles)
        if self.alibi is not None:
            q, k, v = self.alibi.extend(q, k, v, step.positions)
        step.attention(self.spec, q, k, v)

    def _project(
        self, x: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim], and the output gate if
        there is one."""
        qkv = self.qkv(x)
        if self.qkv_limit:
            qkv = qkv.clamp(-self.qkv_limit, self.qkv_limit)
        q, *gate, k, v = qkv.split((*self.sizes[: self.is_gated], *self.sizes), dim=-1)
        if self.query is not None:
            q = self.query(self.query_norm(q))
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.spec.heads, self.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.spec.kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.spec.kv_heads, self.head_dim))
        norms = (self.q_norm, self.k_norm) if self.qk_norm == "head" else ()
        if norms and angles is not None and not any(each._forward_hooks for each in norms):
            weights = self.q_norm.weight, self.k_norm.weight
            q, k = self.ops.norm_rotary(q, k, *weights, self.q_norm.eps, *angles)
            return q, k, v, gate
        if self.qk_norm in ("head", "layer", "layer+bias", "each head"):
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = self.ops.rotary(q, k, *angles)
        if self.qk_norm in ("turned head", "unit"):
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, gate


def _norm_of(
    shape: AttentionShape, rows: tuple[int, int, int], turning: RotaryRows, build: Build
) -> RMSNorm | LayerNorm | HeadsNorm:
    """The norm of q or of k.

    Args:
        rows: heads of all ranks; first and last + 1 of this rank's rows.
    """
    (heads, first, last), dim, eps = rows, shape.head_dim, shape.norm_eps
    if shape.qk_norm == "width":
        return SpreadNorm(heads * dim, dim, build.groups.attention, eps, build)
    if shape.qk_norm == "each head":
        return HeadsNorm(heads, (first // dim, last // dim), turning, eps, build)
    if shape.qk_norm in ("layer", "layer+bias"):
        return LayerNorm(dim, eps, shape.qk_norm == "layer+bias", build, turning)
    return RMSNorm(dim, eps, build, has_weight=shape.qk_norm != "unit")


def paged_cache(spec: AttentionSpec, build: Build, kv_heads: int) -> LayerCache:
    """Cache of this rank's keys and values, as the kernels store them.

    Args:
        kv_heads: of all ranks.
    """
    dtype = build.ops.cache_dtype
    span = ShardRule(0, replicate=True).span(kv_heads, build.groups.attention)
    width = stored_width(spec.head_dim, dtype)
    kept = CacheTensor((spec.kv_heads, width), dtype, (ShardedAxis(kv_heads, *span),))
    kind = WINDOW if spec.window else FULL
    return LayerCache(spec.layer, {"k": kept, "v": kept}, kind, spec.window)
