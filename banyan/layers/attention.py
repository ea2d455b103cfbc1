"""The attention block: one projection to q, k, v, rotation, attention over pages, one back."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.slot import ShardRule
from banyan.layers.step import AttentionSpec, StepInputs
from banyan.ops.api import Ops
from banyan.parallel.mesh import Mesh


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention block over all ranks; the rest as in AttentionSpec."""

    layer: int
    group: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    has_bias: bool = False
    has_output_bias: bool = False


class Attention(nn.Module):
    def __init__(
        self,
        shape: AttentionShape,
        mesh: Mesh,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        whole, width = ShardRule(0, shape.head_dim), shape.heads * shape.head_dim
        shared = ShardRule(0, shape.head_dim, replicate=True)
        kv_width = shape.kv_heads * shape.head_dim
        outputs = {"q": width, "k": kv_width, "v": kv_width}
        rules = {"q": whole, "k": shared, "v": shared}
        first, last = whole.span(width, mesh)
        first_kv, last_kv = shared.span(kv_width, mesh)
        self.ops = ops
        self.sizes = (last - first, last_kv - first_kv, last_kv - first_kv)
        self.spec = AttentionSpec(
            layer=shape.layer,
            group=shape.group,
            heads=self.sizes[0] // shape.head_dim,
            kv_heads=self.sizes[1] // shape.head_dim,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=shape.window,
        )
        self.qkv = ColumnLinear(shape.dim, outputs, rules, shape.has_bias, mesh, ops, dtype, device)
        self.out = RowLinear(
            width,
            shape.dim,
            ShardRule(1, shape.head_dim),
            shape.has_output_bias,
            mesh,
            ops,
            dtype,
            device,
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, step: StepInputs) -> Tensor:
        """x: [tokens, dim]; cos, sin: [tokens, head_dim/2] fp32; returns [tokens, dim]."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = q.unflatten(-1, (self.spec.heads, self.spec.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.spec.kv_heads, self.spec.head_dim))
        v = v.unflatten(-1, (self.spec.kv_heads, self.spec.head_dim))
        q, k = self.ops.rotary(q, k, cos, sin)
        attended = step.attention(self.spec, q, k, v)
        return self.out(attended.flatten(1))
