"""The indexer of sparse latent attention by the NPU's operator.

What it gives is not the bits of ops/api.py: the operator of attention (`latents.py`) takes the
positions themselves, [tokens, 1, top], the best first and -1 behind them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import LATENT_PAGES
from banyan.ascend.ops.needs import NpuToolkit, declines
from banyan.ascend.ops.sparse_contracts import count_from
from banyan.ops import reference
from banyan.ops.bind import Kernel, OpSpec


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
        first: int = 0,
    ) -> Tensor:
        if not len(q):
            return torch.empty((0, 1, top), dtype=torch.int32, device=q.device)
        if key_pages is not turned_pages:  # `joins_index` has said no
            rows = (page_tables, row_starts.to(q.device), context_lengths.to(q.device))
            given = (q, q_turned, weights, key_pages, turned_pages)
            return reference.choose_positions(*given, *rows, top, first)
        query = torch.cat([q, q_turned], -1)
        rows = operators.ends_of(q.device, row_starts, context_lengths)
        given = (weights.contiguous(), page_tables.contiguous(), *rows)
        asked = count_from(top + first)
        chosen = operators.choose_positions(query, key_pages.unsqueeze(2), *given, asked)
        return _from_first(chosen, top) if first else chosen

    return run


def _from_first(chosen: Tensor, top: int) -> Tensor:
    """The best of these but for position 0, which holds nothing and may be anywhere among them.

    chosen: [tokens, 1, more than top]; returns [tokens, 1, top].
    """
    passed = (chosen == 0).int().cumsum(-1)[..., :top]  # 1 from its place on
    return chosen.gather(-1, passed + torch.arange(top, device=chosen.device))


choose_positions = Kernel(supports=_declines, make=_choose_positions)
