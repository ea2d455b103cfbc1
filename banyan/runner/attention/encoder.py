"""Encoder attention: each row is a whole prompt whose tokens all attend to each other; no pages."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepAttention
from banyan.ops.api import Ops
from banyan.runner.attention.base import StepGeometry
from banyan.runner.kvstore import KVStore


class EncoderAttention:
    def __init__(self, ops: Ops, store: KVStore) -> None:
        """Takes the arguments of every backend; keeps nothing between steps."""

    def bind(self, geometry: StepGeometry) -> StepAttention:
        return _Bound(geometry.row_starts.tolist())  # sync: once per step; encoders run on the host


@dataclass(frozen=True)
class _Bound:
    row_starts: list[int]

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "no encoder has sinks"
        borders = zip(self.row_starts, self.row_starts[1:], strict=False)
        rows = [
            scaled_dot_product_attention(
                q[start:end].transpose(0, 1),  # [heads, tokens of the row, head_dim]
                k[start:end].transpose(0, 1),
                v[start:end].transpose(0, 1),
                scale=spec.scale,
                enable_gqa=spec.heads != spec.kv_heads,
            ).transpose(0, 1)
            for start, end in borders
        ]
        return torch.cat(rows)  # [tokens, heads, head_dim]

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        raise NotImplementedError("no encoder has latent attention")

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        raise NotImplementedError("no encoder has latent attention")
