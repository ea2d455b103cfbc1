"""Double sparsity (Yang et al., arXiv 2408.07092): rows of one token attend to few tokens.

A few channels of each head's keys, the heavy ones, give an approximate score for each cached token.
A head then attends exactly to the tokens of the highest scores. Only rows of one token with a long
context are sparse; prompts attend to everything, and so do layers with a window.

Torch does the work, row by row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.config.schema import SparsityConfig
from banyan.layers.step_inputs import AttentionSpec, StepAttention
from banyan.model_config.heavy_channels import read_channels
from banyan.model_config.model_config import ModelConfig
from banyan.ops.api import Ops
from banyan.runner.attention import PagedAttentionBackend, PagedStep, StepGeometry
from banyan.runner.kvstore import KVStore

PlainPages = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class HeavyTokens:
    """Chooses tokens by heavy channels, and attends to them.

    Args:
        plain: turns pages of the kernels' layout into [pages, page_size, kv_heads, head_dim]; None
            = they are plain.
    """

    def __init__(
        self,
        sparsity: SparsityConfig,
        model_config: ModelConfig,
        device: torch.device,
        plain: PlainPages | None,
    ) -> None:
        channels = read_channels(sparsity, model_config)
        self._channels = [torch.tensor(each, device=device) for each in channels]
        self._count = sparsity.tokens
        self._threshold = max(sparsity.threshold, sparsity.tokens + 1)
        self._plain = plain

    def rows_of(self, geometry: StepGeometry) -> list[tuple[int, int, int]]:
        """Row, token and context length, itself included, of each row that is sparse."""
        starts = geometry.row_starts.tolist()  # sync: which rows are sparse
        before = geometry.context_lengths.tolist()
        return [
            (row, start, known + 1)
            for row, (start, end, known) in enumerate(zip(starts, starts[1:], before, strict=False))
            if end - start == 1 and known + 1 >= self._threshold
        ]

    def attend(
        self,
        spec: AttentionSpec,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        length: int,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one token.

        q: [heads, head_dim]; pages: the keys and the values of the row, in order;
        sinks: [heads] fp32. returns: [heads, head_dim], fp32.
        """
        plain = pages if self._plain is None else self._plain(*pages)
        k, v = (each.flatten(0, 1)[:length].transpose(0, 1).float() for each in plain)
        group = spec.heads // spec.kv_heads
        queries = q.float().view(spec.kv_heads, group, spec.head_dim)
        channels = self._channels[spec.layer]  # [kv_heads, heavy]
        labels = k.gather(2, channels[:, None].expand(-1, length, -1))
        asked = queries.gather(2, channels[:, None].expand(-1, group, -1))
        chosen = (asked @ labels.transpose(1, 2)).topk(self._count, dim=-1).indices
        heads = torch.arange(spec.kv_heads, device=k.device)[:, None, None]
        keys, values = k[heads, chosen], v[heads, chosen]  # [kv_heads, group, tokens, head_dim]
        logits = (keys @ queries[..., None]).squeeze(-1) * spec.scale
        if spec.soft_cap:
            logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.view(spec.kv_heads, group, 1)], dim=-1)
        weights = logits.softmax(-1)[..., : self._count]
        return (weights[:, :, None] @ values).view(spec.heads, spec.head_dim)


class DoubleSparsityBackend(PagedAttentionBackend):
    """Paged attention whose long rows of one token are sparse."""

    def __init__(self, ops: Ops, store: KVStore, tokens: HeavyTokens) -> None:
        super().__init__(ops, store)
        self._tokens = tokens

    def bind(self, geometry: StepGeometry) -> StepAttention:
        rows = self._tokens.rows_of(geometry)
        return _SparseStep(self._ops, self._store, geometry, self._first, self._tokens, rows)


@dataclass(frozen=True)
class _SparseStep(PagedStep):
    tokens: HeavyTokens
    rows: Sequence[tuple[int, int, int]]

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        if not self.rows or spec.window:
            return super().__call__(spec, q, k, v, sinks)
        if len(self.rows) == len(q):
            self.write(spec, k, v)
            out = torch.empty_like(q)
        else:
            out = super().__call__(spec, q, k, v, sinks)
        pages = self.store.tensors(spec.layer)
        group = self.store.group_of(spec.layer)
        tables, page_size = self.step.groups[group].page_tables, self.store.groups[group].page_size
        for row, token, length in self.rows:
            table = tables[row, : -(-length // page_size)].long()
            mine = pages["k"][table], pages["v"][table]
            out[token] = self.tokens.attend(spec, q[token], mine, length, sinks).to(out.dtype)
        return out
