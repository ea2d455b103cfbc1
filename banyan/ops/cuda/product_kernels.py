"""Triton kernels of products with quantised weights (`products.py`, `fp8.py`). Imported on first
use.

With few rows the products use the integers, which both half types represent exactly. A chunk's sum
is then multiplied by its group's factor in fp32, so weights are not rounded. With more rows that
costs more than the products; the factors multiply the integers instead, and the weights are rounded
to the activations' type, as in an unpacked weight.
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


@triton.jit
def add_as_last(
    made, bias, out, counters, rows, outputs, m, n, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Of the programs of one tile, the last one to come here adds the parts of all, in order.

    made: [parts, rows, outputs] fp32; counters: one per tile, 0 before and after.
    """
    tl.debug_barrier()  # all threads have written their part
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    parts = tl.num_programs(2)
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1:
        inside = (m < rows)[:, None] & (n < outputs)[None, :]
        at = m.to(tl.int64)[:, None] * outputs + n[None, :]
        total = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
        for part in range(0, parts):
            from_part = made + part * rows.to(tl.int64) * outputs
            total += tl.load(from_part + at, mask=inside, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
        tl.store(counters + tile, 0)


def _multiply(
    x, numbers, scales, minima, units, bias, out, sums, counters, rows, inputs, outputs, filled,
    x_row, steps, per_part, per_group,
    BITS: tl.constexpr, BASE: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_TURNED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, ASSEMBLY: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A block of outputs of some tokens, over one part of the inputs.

    steps: chunks, or pairs of chunks for 4 bits; per_part: steps of a part; per_group: chunks of a
    group; filled: padded outputs; out: [parts, rows, outputs]. ADDS: `add_as_last` adds the parts
    to `sums`.
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
                total, x, x_at, is_row, low, scales, minima, 2 * step, inputs, filled, per_group, n,
                HAS_MINIMA, IS_TURNED, CHUNK,
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
    if HAS_BIAS and not ADDS:
        more = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
        total += more[:, None] if IS_TURNED else more[None, :]
    at = (part * rows + m).to(tl.int64) * outputs
    if IS_TURNED:
        total = tl.trans(total)
    where = out + at[:, None] + n[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
    if ADDS:
        add_as_last(out, bias, sums, counters, rows, outputs, m, n, HAS_BIAS)


@triton.jit
def weights_of(w, scale, low, HAS_MINIMA: tl.constexpr, ASSEMBLY: tl.constexpr):
    """w · scale + low in the type of w. w: [outputs, CHUNK] whole numbers; scale, low: [outputs]
    fp32 of 11 bits. The product is rounded once."""
    if ASSEMBLY != "":
        # Two bf16 numbers hold the 11 bits; whole numbers of 4 bits times the lower one are exact.
        upper = scale.to(tl.bfloat16)
        lower = (scale - upper.to(tl.float32)).to(tl.bfloat16)
        pair = [
            w.to(tl.int16, bitcast=True),
            upper.to(tl.int16, bitcast=True)[:, None],
            lower.to(tl.int16, bitcast=True)[:, None],
            low.to(tl.bfloat16).to(tl.int16, bitcast=True)[:, None],
        ]
        values = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,r,r,r,r", pair, dtype=tl.int16, is_pure=True, pack=2
        ).to(w.dtype, bitcast=True)
    else:
        wide = w.to(tl.float32) * scale[:, None]
        values = (wide + low[:, None] if HAS_MINIMA else wide).to(w.dtype)
    return values


@triton.jit
def factors_of(
    scales, minima, chunk, last, per_group, filled, n, HAS_MINIMA: tl.constexpr
):  # fmt: skip
    """Scales and minima of a chunk of a block of outputs. last: the last chunk with inputs."""
    at = (tl.minimum(chunk, last) // per_group).to(tl.int64) * filled + n
    scale = tl.load(scales + at).to(tl.float32)
    return scale, tl.load(minima + at).to(tl.float32) if HAS_MINIMA else scale


def _multiply_many(
    x, numbers, scales, minima, units, bias, out, sums, counters, rows, inputs, outputs, filled,
    x_row, steps, per_part, per_group,
    BITS: tl.constexpr, BASE: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    ASSEMBLY: tl.constexpr, SCALING: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """`_multiply` for many tokens: factors multiply the integers before the product. Factors of a
    step are read one step earlier."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    CHUNKS: tl.constexpr = 2 if BITS == 4 else 1
    kind = x.dtype.element_ty
    is_row = m < rows
    k = tl.arange(0, CHUNK)
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    inside = n[:, None] * CHUNK + k[None, :]
    size = (filled * CHUNK).to(tl.int64)
    last = (inputs - 1) // CHUNK
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * per_part
    scale, low = factors_of(
        scales, minima, first * CHUNKS, last, per_group, filled, n, HAS_MINIMA
    )  # fmt: skip
    high_scale, high_low = factors_of(
        scales, minima, (first + 1) * CHUNKS - 1, last, per_group, filled, n, HAS_MINIMA
    )  # fmt: skip
    end = tl.minimum(first + per_part, steps)
    tl.assume(first < end)  # or the compiler runs asynchronous products one at a time
    for step in range(first, end):
        codes = tl.load(numbers + step * size + inside)
        chunk = step * CHUNKS
        is_input = is_row[:, None] & (chunk * CHUNK + k < inputs)[None, :]
        values = tl.load(x_at + chunk * CHUNK, mask=is_input, other=0.0)
        if BITS == 4:
            is_input = is_row[:, None] & (chunk * CHUNK + CHUNK + k < inputs)[None, :]
            more = tl.load(x_at + chunk * CHUNK + CHUNK, mask=is_input, other=0.0)
            w, high = opened_pair(codes, kind, BASE, ASSEMBLY)
            w = weights_of(w, scale, low, HAS_MINIMA, SCALING)
            high = weights_of(high, high_scale, high_low, HAS_MINIMA, SCALING)
            high_scale, high_low = factors_of(
                scales, minima, chunk + 3, last, per_group, filled, n, HAS_MINIMA
            )  # fmt: skip
        else:
            w = weights_of(opened(codes, kind, ASSEMBLY), scale, low, HAS_MINIMA, SCALING)
        scale, low = factors_of(
            scales, minima, chunk + CHUNKS, last, per_group, filled, n, HAS_MINIMA
        )  # fmt: skip
        total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
        if BITS == 4:
            total = tl.dot(high, tl.trans(more), total, input_precision="ieee")
    is_output = n < outputs
    if HAS_UNITS:
        total *= tl.load(units + n)[:, None]
    if HAS_BIAS and not ADDS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = (part * rows + m).to(tl.int64) * outputs
    where = out + at[:, None] + n[None, :]
    made = tl.trans(total).to(out.dtype.element_ty)
    tl.store(where, made, mask=is_row[:, None] & is_output[None, :])
    if ADDS:
        add_as_last(out, bias, sums, counters, rows, outputs, m, n, HAS_BIAS)


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


@triton.jit
def opened_float(codes, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The bits of e4m3 numbers as numbers of an activation's type, exactly."""
    if ASSEMBLY != "":
        values = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [codes], dtype=tl.int16, is_pure=True, pack=4
        ).to(KIND, bitcast=True)
    else:
        # fp16 has one more bit of exponent; its numbers with these bits are 256 times less.
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        values = (bits.to(tl.float16, bitcast=True) * 256.0).to(KIND)
    return values


@triton.jit
def round_rows(
    x, numbers, scales, rows, inputs, x_row, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Round one row to 8-bit floats: number = x / scale; MOST: the largest of them.

    numbers: [rows, inputs]; scales: [groups, rows], of GROUP inputs each; GROUP 0: [rows], one for
    the whole row. A row with a number that is not finite becomes NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    numbers += row * inputs
    at = tl.arange(0, BLOCK)
    if GROUP == 0:
        largest = tl.zeros([BLOCK], tl.float32)
        for first in range(0, inputs, BLOCK):
            values = tl.load(x + first + at, mask=first + at < inputs, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
        scale = tl.maximum(tl.max(largest, 0), 1e-30) / MOST
        tl.store(scales + row, scale)
        for first in range(0, inputs, BLOCK):
            values = tl.load(x + first + at, mask=first + at < inputs, other=0.0).to(tl.float32)
            made = (values / scale).to(numbers.dtype.element_ty)
            tl.store(numbers + first + at, made, mask=first + at < inputs)
    else:
        first = tl.program_id(1) * BLOCK
        values = tl.load(x + first + at, mask=first + at < inputs, other=0.0).to(tl.float32)
        groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
        each = tl.maximum(tl.max(tl.abs(groups), 1), 1e-30) / MOST
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group.to(tl.int64) * rows + row, each, mask=group * GROUP < inputs)
        made = tl.reshape(groups / each[:, None], [BLOCK]).to(numbers.dtype.element_ty)
        tl.store(numbers + first + at, made, mask=first + at < inputs)


def _multiply_floats(
    x, x_scales, numbers, scales, bias, out, sums, counters, rows, inputs, outputs, filled, x_row,
    steps, per_part, per_group,
    HOW: tl.constexpr, IS_GROUPED: tl.constexpr, X_IS_GROUPED: tl.constexpr, SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, ASSEMBLY: tl.constexpr, MOST: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A block of outputs of some tokens with 8-bit float weights, over one part of the inputs.

    x: [rows, inputs]; numbers: [filled, inputs]; scales: [groups, filled / SHARED], or one group
    for all inputs (not IS_GROUPED); steps: of STEP inputs; per_part: steps of a part; per_group:
    steps of a group; out: [parts, rows, outputs]. ADDS: `add_as_last` adds the parts to `sums`.
    HOW: "exact": the weights become x's type; "rounding": x is rounded here, with a scale per row
    and step; "rounded": x holds 8-bit floats, x_scales [steps, rows] or [rows] are theirs.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    is_row = m < rows
    k = tl.arange(0, STEP)
    x_at = x + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = numbers + n.to(tl.int64)[:, None] * inputs + k[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    width = (filled // SHARED).to(tl.int64)
    HAS_UNITS: tl.constexpr = HOW == "rounding" or X_IS_GROUPED
    IS_UNIFORM: tl.constexpr = SHARED % OUTPUTS == 0
    first = part * per_part
    end = tl.minimum(first + per_part, steps)
    tl.assume(first < end)  # or the compiler runs asynchronous products one at a time
    for step in range(first, end):
        start = step * STEP
        if IS_EVEN:
            values = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            w = tl.load(w_at + start)
        else:
            is_input = (start + k < inputs)[None, :]
            values = tl.load(x_at + start, mask=is_row[:, None] & is_input, other=0.0)
            w = tl.load(w_at + start, mask=is_input, other=0.0)
        if IS_GROUPED:  # read before the product, which it then does not wait for
            at = scales + (step // per_group) * width
            if IS_UNIFORM:
                scale = tl.load(at + tl.program_id(1) * OUTPUTS // SHARED)
            else:
                scale = tl.load(at + n // SHARED)[:, None]
        if X_IS_GROUPED:
            unit = tl.load(x_scales + step * rows.to(tl.int64) + m, mask=is_row, other=0.0)
        if HOW == "exact":
            w = opened_float(w, x.dtype.element_ty, ASSEMBLY)
        elif HOW == "rounding":
            wide = values.to(tl.float32)
            unit = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30) / MOST
            values = (wide / unit[:, None]).to(numbers.dtype.element_ty)
        if HAS_UNITS and IS_GROUPED:
            total += tl.dot(w, tl.trans(values)) * (unit[None, :] * scale)
        elif HAS_UNITS:
            total += tl.dot(w, tl.trans(values)) * unit[None, :]
        elif IS_GROUPED:
            total += tl.dot(w, tl.trans(values), input_precision="ieee") * scale
        elif HOW == "exact":
            total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
        else:  # sums of 8-bit products have few bits within the tensor core
            total += tl.dot(w, tl.trans(values))
    is_output = n < outputs
    if not IS_GROUPED:
        total *= tl.load(scales + n // SHARED)[:, None]
    if HOW == "rounded" and not X_IS_GROUPED:
        total *= tl.load(x_scales + m, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS and not ADDS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = (part * rows + m).to(tl.int64) * outputs
    where = out + at[:, None] + n[None, :]
    made = tl.trans(total).to(out.dtype.element_ty)
    tl.store(where, made, mask=is_row[:, None] & is_output[None, :])
    if ADDS:
        add_as_last(out, bias, sums, counters, rows, outputs, m, n, HAS_BIAS)


@triton.jit
def unpack_floats(
    numbers, scales, out, inputs, outputs, filled, group,
    SHARED: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """STEP inputs of a block of outputs as plain numbers. numbers: the bits, [filled, inputs]; out:
    [outputs, inputs]"""
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n.to(tl.int64)[:, None] * inputs + k[None, :]
    mask = (n < outputs)[:, None] & (k < inputs)[None, :]
    values = opened_float(tl.load(numbers + inside, mask=mask, other=0), tl.float32, "")
    at = (k // group).to(tl.int64)[None, :] * (filled // SHARED) + (n // SHARED)[:, None]
    values *= tl.load(scales + at, mask=mask, other=0.0)
    tl.store(out + inside, values.to(out.dtype.element_ty), mask=mask)


# Sizes that vary from call to call are not compiled for.
multiply_many = triton.jit(_multiply_many, do_not_specialize=["rows", "steps", "per_part"])
multiply_floats = triton.jit(_multiply_floats, do_not_specialize=["rows", "steps", "per_part"])
multiply = triton.jit(_multiply, do_not_specialize=["rows", "steps", "per_part"])
add_parts = triton.jit(_add_parts, do_not_specialize=["size"])
