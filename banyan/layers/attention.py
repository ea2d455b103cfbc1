"""The attention block: one projection to q, k and v, rotation, attention over pages, and the output
projection."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, ShardedAxis
from banyan.layers.linear import ColumnLinear, Factors, RowLinear
from banyan.layers.norm import RMSNorm, SpreadNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import AttentionSpec, StepInputs
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot
from banyan.model_config.model_config import FULL, WINDOW
from banyan.ops.pages import stored_width
from banyan.ops.stored import StoredWeight


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention block over all ranks; other fields as in AttentionSpec.

    Attributes:
        rotary_dim: leading dimensions of a head that rotate; 0 = all.
        qk_norm: "" | "head" | "turned head" | "width" | "unit": RMSNorm of q and k, per head before
            or after the rotation, or over all heads; "unit" is after it, without weights.
        has_sinks: each head has a learned attention sink.
        is_gated: the output of a head is scaled by the sigmoid of a gate that is projected with q.
        has_head_gates: it is scaled by the sigmoid of one number per head.
        query_rank: width of the low-rank query projection, which is normed; 0 = none. It is
            replicated on every rank (multi-matrix factorisation, Step-3, arXiv 2507.19427).
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
    query_rank: int = 0
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
            head_dim=shape.head_dim,
            scale=shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            unit=build.kv_units[shape.layer] if build.kv_units else 1.0,
        )
        self.cache = paged_cache(self.spec, build, shape.kv_heads)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm == "unit":
            self.unit = torch.ones(shape.head_dim, dtype=build.dtype, device=build.device)
            self.eps = shape.norm_eps
        elif shape.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(shape.head_dim, shape.norm_eps, build)
                if shape.qk_norm != "width"
                else SpreadNorm(of, shape.head_dim, group, shape.norm_eps, build)
                for of in (width, kv_width)
            )
        turning = RotaryRows(shape.head_dim, 0, shape.rotary_dim or shape.head_dim)
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
        attended = step.attention(self.spec, q, k, v, sinks).flatten(1)
        for each in gate:
            attended = self.ops.apply_gate(attended, each, "sigmoid")
        if self.head_gates is not None:
            attended = self.ops.sigmoid_scale(attended, self.head_gates(x))
        return self.factor(self.out(attended))

    def keep(self, x: Tensor, angles: Angles | None, step: StepInputs) -> None:
        """Write keys and values without attending; for steps that only fill the cache. As
        `forward`."""
        q, k, v, _ = self._project(x, angles)
        step.attention(self.spec, q, k, v)

    def _project(
        self, x: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim], and the output gate if
        there is one."""
        q, *gate, k, v = self.qkv(x).split((*self.sizes[: self.is_gated], *self.sizes), dim=-1)
        if self.query is not None:
            q = self.query(self.query_norm(q))
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.spec.heads, self.spec.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.spec.kv_heads, self.spec.head_dim))
        v = v.unflatten(-1, (self.spec.kv_heads, self.spec.head_dim))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = self.ops.rotary(q, k, *angles)
        if self.qk_norm == "turned head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "unit":
            q, k = (self.ops.rms_norm(each, self.unit, self.eps) for each in (q, k))
        return q, k, v, gate


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
