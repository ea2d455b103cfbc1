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
        if not len(q):
            return torch.empty((0, 1, top), dtype=torch.int32, device=q.device)
        if key_pages is not turned_pages:  # `joins_index` has said no
            return reference.choose_positions(
                *(q, q_turned, weights, key_pages, turned_pages),
                *(page_tables, row_starts, context_lengths, top),
            )
        query = torch.cat([q, q_turned], -1)
        rows = operators.ends_of(q.device, row_starts, context_lengths)
        given = (weights.contiguous(), page_tables.contiguous(), *rows)
        return operators.choose_positions(query, key_pages.unsqueeze(2), *given, top)

    return run


choose_positions = Kernel(supports=_declines, make=_choose_positions)
