"""Triton kernels of row-wise ops. Imported on first use, because Triton may be missing.

Numbers are read in their stored type and computed in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def stored(x, inverse, MOST: tl.constexpr):
    """`pages.to_stored` before the type conversion. MOST: the largest 8-bit number; 0 = the type
    has more bits."""
    if MOST > 0:
        wide = x.to(tl.float32) * inverse
        held = tl.minimum(tl.maximum(wide, -MOST), MOST)
        found = tl.where(tl.abs(wide) < float("inf"), held, float("nan"))
    else:
        found = x
    return found


@triton.jit
def put(
    x, pages, scales, at, inverse, MOST: tl.constexpr, HAS_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one head to its page as `pages.to_stored` does; x: [BLOCK_D], zeros after HEAD_DIM; at:
    its place; scales: the pages as fp32. Bytes need enable_fp_fusion=False."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    if HAS_SCALE:
        wide = x.to(tl.float32)
        size = tl.abs(wide)
        most = tl.max(size, 0)
        is_finite = tl.max(tl.where(size < float("inf"), 0, 1), 0) == 0
        is_seen = most >= 7.888609052210118e-31  # 2^-100
        factor = tl.where(is_seen, tl.div_rn(127.0, tl.where(is_seen, most, 1.0)), 0.0)
        turned = tl.where(is_finite, wide, 0.0) * factor
        numbers = (turned + 12582912.0) - 12582912.0  # 1.5 · 2^23: to the nearest, even if halfway
        tl.store(pages + at + dims, numbers.to(tl.int8), mask=is_dim)
        scale = tl.where(is_seen, tl.div_rn(most, 127.0), 0.0)
        tl.store(scales + (at + HEAD_DIM) // 4, tl.where(is_finite, scale, float("nan")))
    else:
        kept = stored(x, inverse, MOST).to(pages.dtype.element_ty)
        tl.store(pages + at + dims, kept, mask=is_dim)


@triton.jit
def write_pages(
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
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
    inverse,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Write K and V of one token and head to their page."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    location = tl.load(locations + token)
    page, inside = location // PAGE, location % PAGE
    key = tl.load(k + token * k_token + head * k_head + dims, mask=is_dim, other=0.0)
    value = tl.load(v + token * v_token + head * v_head + dims, mask=is_dim, other=0.0)
    k_at = page * k_page + inside * k_inside + head * k_page_head
    v_at = page * v_page + inside * v_inside + head * v_page_head
    put(key, k_pages, k_scales, k_at, inverse, MOST, HAS_SCALE, HEAD_DIM, BLOCK_D)
    put(value, v_pages, v_scales, v_at, inverse, MOST, HAS_SCALE, HEAD_DIM, BLOCK_D)


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
    """RMS norm of one part (head) of one row of x, or of x + residual."""
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
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, q_token, q_head, k_token, k_head, heads,
    width, pairs, eps, HAS_NORMS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token, normed before with HAS_NORMS; heads of k follow the heads of q.
    Dimensions after the rotated pairs are copied."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < pairs
    if head < heads:
        source, weight = q + token * q_token + head * q_head, q_weight
        own = q_out + (token * heads + head) * width
    else:
        source, weight = k + token * k_token + (head - heads) * k_head, k_weight
        own = k_out + (token * (tl.num_programs(1) - heads) + head - heads) * width
    first = tl.load(source + at, mask=inside, other=0.0)
    second = tl.load(source + pairs + at, mask=inside, other=0.0)
    kind = q_out.dtype.element_ty
    if HAS_NORMS:
        wide, other = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide * wide + other * other, 0)
        if REST > 0:
            rest = tl.arange(0, REST)
            more = rest < width - 2 * pairs
            last = tl.load(source + 2 * pairs + rest, mask=more, other=0.0)
            squares += tl.sum(last.to(tl.float32) * last.to(tl.float32), 0)
        scale = tl.rsqrt(squares / width + eps)
        first = tl.load(weight + at, mask=inside, other=0.0) * (wide * scale).to(kind)
        second = tl.load(weight + pairs + at, mask=inside, other=0.0) * (other * scale).to(kind)
        if REST > 0:
            factor = tl.load(weight + 2 * pairs + rest, mask=more, other=0.0)
            last = factor * (last.to(tl.float32) * scale).to(kind)
            tl.store(own + 2 * pairs + rest, last, mask=more)
    elif REST > 0:
        rest = tl.arange(0, REST)
        more = rest < width - 2 * pairs
        tl.store(own + 2 * pairs + rest, tl.load(source + 2 * pairs + rest, mask=more), mask=more)
    first, second = first.to(tl.float32), second.to(tl.float32)
    c = tl.load(cos + token * pairs + at, mask=inside, other=0.0)
    s = tl.load(sin + token * pairs + at, mask=inside, other=0.0)
    tl.store(own + at, (first * c - second * s).to(kind), mask=inside)
    tl.store(own + pairs + at, (second * c + first * s).to(kind), mask=inside)


@triton.jit
def silu_gate(gate_up, out, row_stride, width, limit, LIMITED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one row: silu(gate) · up, rounded like the two torch ops."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + at, mask=inside, other=0.0)
    opened = gate / (1.0 + tl.exp(-gate))
    if LIMITED:
        opened = tl.minimum(opened, limit)
        up = tl.maximum(tl.minimum(up.to(tl.float32), limit), -limit).to(gate_up.dtype.element_ty)
    tl.store(out + row * width + at, opened.to(up.dtype) * up, mask=inside)
