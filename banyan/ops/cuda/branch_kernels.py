"""Triton kernels of rows whose drafts branch (`paths` of `Ops.paged_attention`). Imported on first
use, because Triton may be missing.

A path begins with its base and its length; length 0 = the token has none. Positions before the base
are where they always are, and the path has the places of the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from banyan.ops.cuda.attention_kernels import capped
from banyan.ops.cuda.needs import LEAST_BLOCK, power_of_two


@triton.jit
def owner_of(row_starts, rows, token):
    """The row of a token."""
    low: tl.int32 = 0
    high: tl.int32 = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(row_starts + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def length_of(path, length):
    """Positions that a token sees; length: without a path."""
    count = tl.load(path + 1)
    return tl.where(count > 0, tl.load(path) + count, length)


@triton.jit
def places_of(path, key, is_key):
    """Where the positions `key` are stored."""
    base, count = tl.load(path), tl.load(path + 1)
    is_on_path = is_key & (key >= base) & (key < base + count)
    return tl.where(is_on_path, tl.load(path + 2 + key - base, mask=is_on_path, other=0), key)


@triton.jit
def attend_paths(
    q, k_pages, v_pages, k_scales, v_scales, page_tables, row_starts, paths, out, sinks,
    scale, soft_cap, unit, rows, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    table_row, path_token, out_token, out_head, window,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The query heads of one kv head of a token that has a path; other tokens are left alone.
    k_scales, v_scales: the pages as fp32, if they hold int8 and a scale after each head's."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    own = token.to(tl.int64)
    path = paths + own * path_token
    if tl.load(path + 1) == 0:
        return
    length = length_of(path, 0)
    lowest = tl.maximum(0, -window)
    if window > 0:
        lowest = tl.maximum(0, length - window)
    tables = page_tables + owner_of(row_starts, rows, token).to(tl.int64) * table_row
    at, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    head, is_query, is_dim = kv_head * GROUP + at, at < GROUP, dims < HEAD_DIM
    is_own = is_query[:, None] & is_dim[None, :]
    q_at = q + own * q_token + head[:, None] * q_head + dims[None, :]
    query = tl.load(q_at, mask=is_own, other=0.0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:  # a logit without a value
        best = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
        total = total + 1.0
    result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for begin in range(lowest // KEYS * KEYS, length, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = (key >= lowest) & (key < length)
        place = places_of(path, key, is_key)
        page = tl.load(tables + place // PAGE, mask=is_key, other=0).to(tl.int64)
        inside, is_there = place % PAGE, is_key[:, None] & is_dim[None, :]
        k_at = page * k_page + inside * k_token + kv_head * k_head
        v_at = page * v_page + inside * v_token + kv_head * v_head
        k = tl.load(k_pages + k_at[:, None] + dims[None, :], mask=is_there, other=0.0)
        v = tl.load(v_pages + v_at[:, None] + dims[None, :], mask=is_there, other=0.0)
        if HAS_SCALES:
            k_scale = tl.load(k_scales + (k_at + HEAD_DIM) // 4, mask=is_key, other=0.0)
            v_scale = tl.load(v_scales + (v_at + HEAD_DIM) // 4, mask=is_key, other=0.0)
            k, v = k.to(tl.float32) * k_scale[:, None], v.to(tl.float32) * v_scale[:, None]
        k, v = k.to(query.dtype), v.to(query.dtype)
        logit = tl.dot(query, tl.trans(k), input_precision="ieee") * (scale * unit)
        if HAS_CAP:
            logit = capped(logit, soft_cap)
        logit = tl.where(is_key[None, :], logit, float("-inf"))
        larger = tl.maximum(best, tl.max(logit, 1))
        weight, kept = tl.exp(logit - larger[:, None]), tl.exp(best - larger)
        total = total * kept + tl.sum(weight, 1)
        result = result * kept[:, None]
        result = tl.dot(weight.to(query.dtype), v, result, input_precision="ieee")
        best = larger
    result = result / total[:, None] * unit
    place = out + own * out_token + head[:, None] * out_head + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_own)


def enter_branches(
    out: Tensor,
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_tables: Tensor,
    row_starts: Tensor,
    paths: Tensor,
    numbers: tuple[float, float, float],
    window: int,
    sinks: Tensor | None,
) -> None:
    """Replace what tokens with a path have in `out` by `Ops.paged_attention` along their paths.

    numbers: scale, soft cap and unit.
    """
    (tokens, heads, head_dim), (page_size, kv_heads) = q.shape, pages[0].shape[1:3]
    group = heads // kv_heads
    has_scales = pages[0].dtype == torch.int8
    scales = tuple(each.view(torch.float32) for each in pages) if has_scales else pages
    is_wide = head_dim > 128 or q.dtype == torch.float32
    attend_paths[(tokens, kv_heads)](
        q,
        *pages,
        *scales,
        page_tables,
        row_starts,
        paths,
        out,
        q if sinks is None else sinks,
        *numbers,
        len(page_tables),
        *q.stride()[:2],
        *pages[0].stride()[:3],
        *pages[1].stride()[:3],
        page_tables.stride(0),
        paths.stride(0),
        *out.stride()[:2],
        window,
        HAS_CAP=bool(numbers[1]),
        HAS_SINKS=sinks is not None,
        HAS_SCALES=has_scales,
        PAGE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_two(head_dim, LEAST_BLOCK),
        GROUP=group,
        BLOCK=power_of_two(group, LEAST_BLOCK),
        KEYS=32 if is_wide else 64,
        num_warps=4,
    )
