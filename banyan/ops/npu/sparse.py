"""The indexer of sparse latent attention by the NPU's operator.

What it gives is not the bits of ops/api.py: the operator of attention (`latents.py`) takes the
positions themselves, [tokens, 1, top], the best first and -1 behind them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.npu.contracts import LATENT_PAGES
from banyan.ops.npu.needs import NpuToolkit, declines
from banyan.ops.npu.pages import lengths_of
from banyan.ops.npu.sparse_contracts import INDEX_DIM, MOST_INDEX_HEADS, is_count


def _declines(spec: OpSpec) -> str | None:
    reason = declines(spec)
    if reason is None and spec.cache_dtype != spec.dtype:
        reason = f"pages are {spec.cache_dtype}, activations {spec.dtype}"
    if reason is None and spec.page_size not in LATENT_PAGES:
        sizes = " or ".join(map(str, LATENT_PAGES))
        reason = f"pages of {spec.page_size} tokens, not of {sizes}"
    return reason


def _choose_positions(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    operators = toolkit.operators

    def run(
        q: Tensor,
        q_turned: Tensor,
        weights: Tensor,
        key_pages: Tensor,
        turned_pages: Tensor,
        page_tables: Tensor,
        row_starts: Tensor,
        context_lengths: Tensor,
        top: int,
    ) -> Tensor:
        assert row_starts.is_cpu and context_lengths.is_cpu, "lengths come from the host"
        if not len(q):
            return torch.empty((0, 1, top), dtype=torch.int32, device=q.device)
        width, heads = q.shape[2] + q_turned.shape[2], q.shape[1]
        if width != INDEX_DIM or heads > MOST_INDEX_HEADS or not is_count(top):
            return reference.choose_positions(
                *(q, q_turned, weights, key_pages, turned_pages),
                *(page_tables, row_starts, context_lengths, top),
            )
        starts = row_starts.tolist()
        lengths, size = lengths_of(starts, context_lengths.tolist()), key_pages.shape[1]
        # The operator wants both parts of a key side by side: those of the rows' pages, renumbered.
        used = page_tables[:, : -(-max(lengths) // size)].long()
        keys = torch.cat([key_pages[used], turned_pages[used]], -1).flatten(0, 1).unsqueeze(2)
        tables = torch.arange(used.numel(), dtype=torch.int32, device=q.device).view(used.shape)
        query = torch.cat([q, q_turned], -1)
        rows = operators.on_device(q.device, starts, lengths)
        return operators.choose_positions(query, keys, weights.contiguous(), tables, *rows, top)

    return run


choose_positions = Kernel(supports=_declines, make=_choose_positions)
