"""The Triton kernels themselves. Imported on first use: a machine without Triton has no need of it.

Numbers are read in the type they are stored in and worked on in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def row_of(row_starts, rows, block, PER_BLOCK: tl.constexpr):
    """The row that a block of queries belongs to: row r begins at block
    row_starts[r] // PER_BLOCK + r, and the last ones of a row may be empty."""
    low: tl.int32 = 0
    high: tl.int32 = rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(row_starts + middle) // PER_BLOCK + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def capped(logit, cap):
    """cap · tanh(logit / cap)."""
    turned = tl.exp(-2.0 * tl.abs(logit / cap))
    tanh = (1.0 - turned) / (1.0 + turned)
    return cap * tl.where(logit < 0, -tanh, tanh)


@triton.jit
def page_at(tables, key, is_key, stride, inside_stride, PAGE: tl.constexpr):
    """Where the pages have some keys of one row, whose page table is `tables`."""
    page = tl.load(tables + key // PAGE, mask=is_key, other=0).to(tl.int64)
    return page * stride + key % PAGE * inside_stride


@triton.jit
def attend(
    q, k_pages, v_pages, page_tables, row_starts, context_lengths, out, sinks,
    scale, soft_cap, rows, q_token, q_head, k_page, k_token, k_head, v_page, v_token,
    v_head, table_row, out_token, out_head, window,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one kv head: some tokens of a row, times its query heads."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_of(row_starts, rows, block, PER_BLOCK)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    first = (block - (start // PER_BLOCK + row)) * PER_BLOCK
    if first >= count:
        return
    context = tl.load(context_lengths + row)
    tables = page_tables + row.to(tl.int64) * table_row
    at = tl.arange(0, BLOCK)
    token, head = first + at // GROUP, kv_head * GROUP + at % GROUP
    is_query = (at < PER_BLOCK * GROUP) & (token < count)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    q_at = (start + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    query = tl.load(q + q_at, mask=is_query[:, None] & is_dim[None, :], other=0.0)
    position = context + token
    length = context + tl.minimum(first + PER_BLOCK, count)
    lowest = 0
    if window > 0:
        lowest = tl.maximum(0, context + first - window + 1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:  # a logit without a value
        best = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
        total = total + 1.0
    result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for begin in range(lowest // KEYS * KEYS, length, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = (key >= lowest) & (key < length)
        k_at = page_at(tables, key, is_key, k_page, k_token, PAGE) + kv_head * k_head
        k = tl.load(
            k_pages + k_at[None, :] + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        logit = tl.dot(query, k.to(query.dtype), input_precision="ieee") * scale
        if HAS_CAP:
            logit = capped(logit, soft_cap)
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - window)
        logit = tl.where(is_seen, logit, float("-inf"))
        larger = tl.maximum(best, tl.max(logit, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp(logit - base[:, None])
        kept = tl.exp(best - base)
        total = total * kept + tl.sum(weight, 1)
        v_at = page_at(tables, key, is_key, v_page, v_token, PAGE) + kv_head * v_head
        v = tl.load(
            v_pages + v_at[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        v = v.to(query.dtype)
        result = result * kept[:, None]
        result += tl.dot(weight.to(query.dtype), v, input_precision="ieee")
        best = larger
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    out_at = (start + token).to(tl.int64)[:, None] * out_token
    out_at += head[:, None] * out_head + dims[None, :]
    tl.store(out + out_at, result.to(query.dtype), mask=is_query[:, None] & is_dim[None, :])


@triton.jit
def write_pages(
    k,
    v,
    k_pages,
    v_pages,
    locations,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_inside,
    k_page_head,
    v_page,
    v_inside,
    v_page_head,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K and V of one token and head into their page."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    location = tl.load(locations + token)
    page, inside = location // PAGE, location % PAGE
    key = tl.load(k + token * k_token + head * k_head + dims, mask=is_dim)
    value = tl.load(v + token * v_token + head * v_head + dims, mask=is_dim)
    k_at = page * k_page + inside * k_inside + head * k_page_head + dims
    v_at = page * v_page + inside * v_inside + head * v_page_head + dims
    tl.store(k_pages + k_at, key.to(k_pages.dtype.element_ty), mask=is_dim)
    tl.store(v_pages + v_at, value.to(v_pages.dtype.element_ty), mask=is_dim)


@triton.jit
def norm(
    x,
    residual,
    weight,
    out,
    total,
    x_row,
    x_part,
    parts,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of one part (head) of one row, of x + residual where there is one."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    own = (row * parts + part) * width + at
    values = tl.load(x + row * x_row + part * x_part + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        values = values + tl.load(residual + own, mask=inside, other=0.0)
        tl.store(total + own, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(values.dtype)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + own, factor * normed, mask=inside)


@triton.jit
def rotate(
    x, cos, sin, out, x_token, x_head, heads, width, pairs, BLOCK: tl.constexpr, REST: tl.constexpr
):
    """One head of one token; dimensions behind the pairs are copied."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < pairs
    source = x + token * x_token + head * x_head
    own = out + (token * heads + head) * width
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + pairs + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * pairs + at, mask=inside, other=0.0)
    s = tl.load(sin + token * pairs + at, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    tl.store(own + at, (first * c - second * s).to(kind), mask=inside)
    tl.store(own + pairs + at, (second * c + first * s).to(kind), mask=inside)
    if REST > 0:
        rest = tl.arange(0, REST)
        more = rest < width - 2 * pairs
        tl.store(own + 2 * pairs + rest, tl.load(source + 2 * pairs + rest, mask=more), mask=more)


@triton.jit
def silu_gate(gate_up, out, row_stride, width, BLOCK: tl.constexpr):
    """A block of one row: silu(gate) · up, rounded as two ops of torch round."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + at, mask=inside, other=0.0)
    opened = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * width + at, opened * up, mask=inside)
