"""Triton kernels of products with quantised weights (`products.py`). Imported on first use.

The products use the integers, which both half types represent exactly. A chunk's sum is then
multiplied by its group's factor in fp32. So weights are never rounded.
"""

import triton
import triton.language as tl


@triton.jit
def opened_pair(codes, KIND: tl.constexpr, BASE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The low and the high nibbles of bytes, minus BASE, in an activation's type."""
    if ASSEMBLY != "":
        low, high = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [codes], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
        low, high = low.to(KIND, bitcast=True), high.to(KIND, bitcast=True)
    else:
        low, high = (codes & 15).to(KIND) - BASE, (codes >> 4).to(KIND) - BASE
    return low, high


@triton.jit
def opened(codes, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """8-bit numbers in an activation's type."""
    if ASSEMBLY != "":
        values = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [codes], dtype=tl.int16, is_pure=True, pack=4
        ).to(KIND, bitcast=True)
    else:
        values = codes.to(KIND)
    return values


@triton.jit
def add_chunk(
    total, x, x_at, is_row, w, scales, minima, chunk, inputs, filled, per_group, n,
    HAS_MINIMA: tl.constexpr, IS_TURNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add the product of one chunk of inputs. total: [tokens, outputs] of a block, or transposed;
    w: [outputs, CHUNK]."""
    k = chunk * CHUNK + tl.arange(0, CHUNK)
    is_input = is_row[:, None] & (k < inputs)[None, :]
    part = tl.load(x + x_at[:, None] + k[None, :], mask=is_input, other=0.0)
    # Of 4-bit numbers the last chunk may have no second one: its inputs read as zeros.
    group = tl.minimum(chunk, (inputs - 1) // CHUNK) // per_group
    at = group.to(tl.int64) * filled + n
    scale = tl.load(scales + at).to(tl.float32)
    if IS_TURNED:
        made = tl.dot(w, tl.trans(part), input_precision="ieee") * scale[:, None]
    else:
        made = tl.dot(part, tl.trans(w), input_precision="ieee") * scale[None, :]
    if HAS_MINIMA:
        low = tl.load(minima + at).to(tl.float32)
        whole = tl.sum(part.to(tl.float32), 1)
        made += low[:, None] * whole[None, :] if IS_TURNED else whole[:, None] * low[None, :]
    return total + made


def _multiply(
    x, numbers, scales, minima, units, bias, out, rows, inputs, outputs, filled, x_row,
    steps, per_part, per_group,
    BITS: tl.constexpr, BASE: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_TURNED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """A block of outputs of some tokens, over one part of the inputs.

    steps: chunks, or pairs of chunks for 4 bits; per_part: steps of a part; per_group: chunks of a
    group; filled: padded outputs; out: [parts, rows, outputs].
    """
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    is_row = m < rows
    x_at = m.to(tl.int64) * x_row
    kind = x.dtype.element_ty
    inside = n[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    if IS_TURNED:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = part * per_part
    size = (filled * CHUNK).to(tl.int64)
    for step in range(first, tl.minimum(first + per_part, steps)):
        codes = tl.load(numbers + step * size + inside)
        if BITS == 4:
            low, high = opened_pair(codes, kind, BASE, ASSEMBLY)
            total = add_chunk(
                total, x, x_at, is_row, low, scales, minima, 2 * step, inputs, filled, per_group,
                n, HAS_MINIMA, IS_TURNED, CHUNK,
            )  # fmt: skip
            total = add_chunk(
                total, x, x_at, is_row, high, scales, minima, 2 * step + 1, inputs, filled,
                per_group, n, HAS_MINIMA, IS_TURNED, CHUNK,
            )  # fmt: skip
        else:
            values = opened(codes, kind, ASSEMBLY)
            total = add_chunk(
                total, x, x_at, is_row, values, scales, minima, step, inputs, filled,
                per_group, n, HAS_MINIMA, IS_TURNED, CHUNK,
            )  # fmt: skip
    is_output = n < outputs
    if HAS_UNITS:
        unit = tl.load(units + n)
        total *= unit[:, None] if IS_TURNED else unit[None, :]
    if HAS_BIAS:
        more = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
        total += more[:, None] if IS_TURNED else more[None, :]
    at = (part * rows + m).to(tl.int64) * outputs
    if IS_TURNED:
        total = tl.trans(total)
    where = out + at[:, None] + n[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def _add_parts(parts, bias, out, count, size, outputs, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of parts [count, size] in order, plus the bias [outputs]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, count):
        total += tl.load(parts + part * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def unpack(
    numbers, scales, minima, units, out, inputs, outputs, filled, per_group,
    BITS: tl.constexpr, BASE: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    CHUNK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One chunk of a block of outputs as plain numbers. out: [outputs, inputs]"""
    chunk = tl.program_id(0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, CHUNK)
    step = chunk // 2 if BITS == 4 else chunk
    inside = n[:, None] * CHUNK + k[None, :]
    codes = tl.load(numbers + step.to(tl.int64) * filled * CHUNK + inside)
    if BITS == 4:
        codes = codes >> (chunk % 2 * 4).to(tl.uint8) & 15
    values = codes.to(tl.float32)
    if BITS == 4:
        values = values - BASE
    at = (chunk // per_group).to(tl.int64) * filled + n
    values = values * tl.load(scales + at).to(tl.float32)[:, None]
    if HAS_MINIMA:
        values += tl.load(minima + at).to(tl.float32)[:, None]
    if HAS_UNITS:
        values *= tl.load(units + n)[:, None]
    where = out + n.to(tl.int64)[:, None] * inputs + (chunk * CHUNK + k)[None, :]
    tl.store(where, values.to(out.dtype.element_ty), mask=(n < outputs)[:, None])


# Sizes that vary from call to call are not compiled for.
multiply = triton.jit(_multiply, do_not_specialize=["rows", "steps", "per_part"])
add_parts = triton.jit(_add_parts, do_not_specialize=["size"])
