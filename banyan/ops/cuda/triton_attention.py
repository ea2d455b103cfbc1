"""Attention over pages in Triton: one kernel for rows of one token and of many.

The grid depends on how many rows and tokens there are, never on their lengths, so a launch can be
captured. A block of queries is some tokens of one row times the query heads of one kv head. Keys
are taken in blocks that begin at multiples of their size, in their order.
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines_pages

_DECODE_BLOCK, _EXTEND_BLOCK = 16, 64
_KEYS = 64


def _paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    from banyan.ops.cuda.kernels import attend

    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    rows, group = context_lengths.shape[0], heads // kv_heads
    wide = head_dim > 128 or q.dtype == torch.float32  # what a block holds at once is bounded
    extend = _EXTEND_BLOCK // 2 if wide else _EXTEND_BLOCK
    width = _DECODE_BLOCK if tokens == rows else extend
    block = max(width, 1 << (group - 1).bit_length())
    per_block = block // group
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attend[(tokens // per_block + rows, kv_heads)](
        q,
        k_pages,
        v_pages,
        page_tables,
        row_starts,
        context_lengths,
        out,
        q if sinks is None else sinks,
        scale,
        soft_cap,
        rows,
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        page_tables.stride(0),
        *out.stride()[:2],
        window,
        HAS_CAP=bool(soft_cap),
        HAS_SINKS=sinks is not None,
        PAGE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_D=1 << (head_dim - 1).bit_length(),
        GROUP=group,
        PER_BLOCK=per_block,
        BLOCK=block,
        KEYS=_KEYS // 2 if wide else _KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out


def _write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, flat_locations: Tensor
) -> None:
    from banyan.ops.cuda.kernels import write_pages

    tokens, kv_heads, head_dim = k.shape
    write_pages[(tokens, kv_heads)](
        k,
        v,
        k_pages,
        v_pages,
        flat_locations,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        PAGE=k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=1 << (head_dim - 1).bit_length(),
        num_warps=1,
    )


paged_attention = Kernel(supports=declines_pages, run=_paged_attention)
write_kv = Kernel(supports=declines_pages, run=_write_kv)
