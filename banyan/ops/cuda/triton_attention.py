"""Attention over pages in Triton: a kernel for steps whose rows have one token each, and one for
rows of many.

The grid depends on how many rows and tokens there are, never on their lengths, so a launch can be
captured. A block of queries is some tokens of one row times the query heads of one kv head. Keys
are taken in blocks that begin at multiples of their size, in their order. Where few rows of one
token would leave processors without work, the keys of each are divided among several programs
(Dao et al., Flash-Decoding, 2023).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines_pages
from banyan.ops.pages import FLOAT8

_LOG2_E = 1 / math.log(2)
_LEAST_BLOCK = 16
"""Queries, and dimensions, of a matrix product."""
_PART = 256
"""Keys that are seen by themselves, in rows of one token."""
_PROGRAMS = 512
"""Fewer of them leave processors without work: about four for each of a large device."""


@dataclass(frozen=True)
class Tiles:
    """How much of its work a program holds at once.

    Attributes:
        queries: of rows of many tokens.
        keys: of a block.
        warps, stages: of a program; blocks of keys that are on their way.
    """

    queries: int
    keys: int
    warps: int
    stages: int


MANY, MANY_WIDE = Tiles(128, 128, 8, 2), Tiles(32, 32, 4, 2)
"""Rows of many tokens; heads of more than 128 dimensions, or of fp32."""
ONE, ONE_WIDE = Tiles(_LEAST_BLOCK, 128, 4, 3), Tiles(_LEAST_BLOCK, 32, 4, 2)
"""Rows of one token, in the same way."""


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
    unit: float = 1.0,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = (q, k_pages, v_pages, page_tables, row_starts, context_lengths, out)
    run = _attend_rows if q.shape[0] == context_lengths.shape[0] else _attend
    scale = scale * unit if soft_cap else scale * unit * _LOG2_E
    run(*tensors, scale, window, soft_cap, sinks, unit)
    return out


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    unit: float,
) -> None:
    from banyan.ops.cuda.attention_kernels import attend

    tokens, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    rows, group = context_lengths.shape[0], heads // kv_heads
    tiles = MANY_WIDE if _is_wide(q) else MANY
    block = max(tiles.queries, _power(group))
    per_block = block // group
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
        unit,
        rows,
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        page_tables.stride(0),
        *out.stride()[:2],
        window,
        HAS_CAP=bool(soft_cap),
        HAS_SINKS=sinks is not None,
        PAGE=k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=max(_LEAST_BLOCK, _power(head_dim)),
        GROUP=group,
        PER_BLOCK=per_block,
        BLOCK=block,
        KEYS=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _attend_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    unit: float,
) -> None:
    from banyan.ops.cuda.attention_kernels import attend_rows, merge

    rows, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    group, wide = heads // kv_heads, max(_LEAST_BLOCK, _power(head_dim))
    tiles = ONE_WIDE if _is_wide(q) else ONE
    parts = -(-page_tables.shape[1] * page_size // _PART)
    programs = max(1, min(parts, _PROGRAMS // (rows * kv_heads)))
    room = rows * heads * parts if programs > 1 else 0
    sums = torch.empty((2, room), dtype=torch.float32, device=q.device)
    results = torch.empty((room, wide), dtype=torch.float32, device=q.device)
    given = q if sinks is None else sinks
    attend_rows[(rows, kv_heads, programs)](
        q,
        k_pages,
        v_pages,
        page_tables,
        context_lengths,
        out,
        given,
        *sums,
        results,
        scale,
        soft_cap,
        unit,
        heads,
        parts,
        programs,
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
        BLOCK_D=wide,
        GROUP=group,
        BLOCK=max(_LEAST_BLOCK, _power(group)),
        KEYS=tiles.keys,
        PART=_PART,
        IS_SPLIT=programs > 1,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if programs > 1:
        merge[(rows, heads)](
            *sums,
            results,
            context_lengths,
            out,
            given,
            unit,
            heads,
            parts,
            *out.stride()[:2],
            window,
            HAS_SINKS=sinks is not None,
            HEAD_DIM=head_dim,
            BLOCK_D=wide,
            PART=_PART,
            num_warps=1,
        )


def _is_wide(q: Tensor) -> bool:
    """What a block holds at once is bounded."""
    return q.shape[-1] > 128 or q.dtype == torch.float32


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    flat_locations: Tensor,
    unit: float = 1.0,
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
        1 / unit,
        PAGE=k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=_power(head_dim),
        MOST=torch.finfo(k_pages.dtype).max if k_pages.dtype in FLOAT8 else 0,
        num_warps=1,
    )


paged_attention = Kernel(supports=declines_pages, run=_paged_attention)
write_kv = Kernel(supports=declines_pages, run=_write_kv)
