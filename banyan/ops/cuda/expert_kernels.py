"""Triton kernels of experts. Imported on first use, because Triton may be missing.

(token, expert) pairs are numbered token · per_token + choice. `order_pairs` sorts them by expert
and cuts each expert's pairs into blocks of rows; a block uses one expert's weights only. The grids
depend only on the numbers of pairs and experts, so no launch waits for the router's choice, and
launches can be captured.

Weights lie as `expert_weights.py` says. Their numbers are exact in the activations' type, or in
8-bit floats if the activations are rounded to these. The sum of a chunk of inputs is multiplied by
its factor in fp32.
"""

import triton
import triton.language as tl

from banyan.ops.cuda.product_kernels import opened, opened_pair


@triton.jit
def _chosen_here(ids, at, pairs, first, experts):
    """The experts of some pairs, relative to this rank's first; `experts` = not on this rank."""
    expert = tl.load(ids + at, mask=at < pairs, other=-1) - first
    is_here = (at < pairs) & (expert >= 0) & (expert < experts)
    return tl.where(is_here, expert, experts).to(tl.int32)


@triton.jit
def order_pairs(
    ids, order, block_experts, block_firsts, block_ends, total, pairs, first, experts,
    BINS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows and the blocks of one expert; the pairs of an expert stay in their order."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        counts += tl.histogram(_chosen_here(ids, at, pairs, first, experts), BINS)
    blocks = tl.where(bins < experts, (counts + BLOCK - 1) // BLOCK, 0)
    row = tl.sum(tl.where(bins < expert, counts, 0), 0)
    block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    end = row + tl.sum(tl.where(bins == expert, counts, 0), 0)
    if expert == 0:
        tl.store(total, tl.sum(blocks, 0))
    for start in range(row, end, BLOCK):
        tl.store(block_experts + block, expert)
        tl.store(block_firsts + block, start)
        tl.store(block_ends + block, end)
        block += 1
    if row < end:
        for begin in range(0, pairs, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            is_mine = (_chosen_here(ids, at, pairs, first, experts) == expert).to(tl.int32)
            tl.store(order + row + tl.cumsum(is_mine, 0) - 1, at, mask=is_mine > 0)
            row += tl.sum(is_mine, 0)


@triton.jit
def _expert_of(ids, block_experts, total, block, first, experts, ALONE: tl.constexpr):
    """The expert of a block of rows; −1 = empty block. ALONE: pair, block and row have the same
    number, because nothing was sorted."""
    if ALONE:
        expert = tl.load(ids + block) - first
        return tl.where((expert >= 0) & (expert < experts), expert, -1)
    else:
        is_used = block < tl.load(total)
        return tl.load(block_experts + block, mask=is_used, other=-1).to(tl.int64)


@triton.jit
def _rows_of(order, block_firsts, block_ends, block, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a block, the mask of those that exist, and their pairs."""
    if ALONE:
        row = block + tl.arange(0, BLOCK)
        is_row = row == block
        return row, is_row, tl.where(is_row, row, block)
    else:
        row = tl.load(block_firsts + block) + tl.arange(0, BLOCK)
        is_row = row < tl.load(block_ends + block)
        return row, is_row, tl.load(order + row, mask=is_row, other=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _opened(gate, up, limit, alpha, GATE: tl.constexpr):
    """The gated activation; GATE as in `triton_experts`."""
    if GATE == "silu":
        return gate * _sigmoid(gate) * up
    elif GATE == "limited":
        return tl.minimum(gate * _sigmoid(gate), limit) * tl.maximum(tl.minimum(up, limit), -limit)
    elif GATE == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif GATE == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * _sigmoid(2.0 * inner) * up
    else:  # clamped
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        return gate * _sigmoid(alpha * gate) * (up + 1.0)


@triton.jit
def _floats_of(codes, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The low and the high nibbles of bytes as 4-bit floats (e2m1) in an activation's type."""
    if ASSEMBLY != "":
        low, high = opened_pair(codes, KIND, 0, ASSEMBLY)
    else:
        low, high = _float_of(codes & 15).to(KIND), _float_of(codes >> 4).to(KIND)
    return low, high


@triton.jit
def _float_of(code):
    magnitude = (code & 7).to(tl.int32)
    halves = tl.where(magnitude < 4, magnitude, (2 + (magnitude & 1)) << ((magnitude >> 1) - 1))
    value = halves.to(tl.float32) * 0.5
    return tl.where(code > 7, -value, value)


@triton.jit
def _factor_of(factors, at):
    """fp32; bytes are the exponents of powers of two."""
    raw = tl.load(factors + at)
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.int32) << 23
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def rounded(values):
    """values [rows, inputs] fp32 as 8-bit floats, and the factor of each row."""
    unit = tl.max(tl.abs(values), 1) * (1.0 / 448.0)
    unit = tl.where(unit > 0.0, unit, 1.0)
    return (values / unit[:, None]).to(tl.float8e4nv), unit


@triton.jit
def _with_chunk(
    total, part, units, values, scale, low,
    IS_ONCE: tl.constexpr, HAS_MINIMA: tl.constexpr, ROUNDS: tl.constexpr, IS_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total plus the product of a chunk of inputs. part: [rows, CHUNK]; values: [columns, CHUNK];
    units: [rows] of 8-bit floats; scale, low: [columns]. IS_ONCE: one scale for all chunks, which
    multiplies the end."""
    if IS_ONCE and ROUNDS == "":
        if IS_TURNED:
            total = tl.dot(values, tl.trans(part), total, input_precision=PRECISION)
        else:
            total = tl.dot(part, tl.trans(values), total, input_precision=PRECISION)
    else:
        if IS_TURNED:
            made = tl.dot(values, tl.trans(part), input_precision=PRECISION)
            if ROUNDS != "":
                made *= units[None, :]
            if not IS_ONCE:
                made *= scale[:, None]
        else:
            made = tl.dot(part, tl.trans(values), input_precision=PRECISION)
            if ROUNDS != "":
                made *= units[:, None]
            if not IS_ONCE:
                made *= scale[None, :]
        if HAS_MINIMA:
            whole = tl.sum(part.to(tl.float32), 1)
            made += low[:, None] * whole[None, :] if IS_TURNED else whole[:, None] * low[None, :]
        total += made
    return total


@triton.jit
def _part_of(
    source, units, chunk, inputs, CHUNK: tl.constexpr, WHOLE: tl.constexpr, ROUNDS: tl.constexpr
):
    """A chunk of rows of activations, and of their factors. source, units: pointers [rows]."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    if WHOLE:
        part = tl.load(source[:, None] + at[None, :])
    else:
        part = tl.load(source[:, None] + at[None, :], mask=(at < inputs)[None, :], other=0.0)
    unit = 0.0
    if ROUNDS == "here":
        part, unit = rounded(part.to(tl.float32))
    elif ROUNDS == "before":
        unit = tl.load(units + chunk)
    return part, unit


@triton.jit
def _with_step(
    total, source, units, codes, step, inputs, scale, low, other_scale, other_low,
    NUMBER: tl.constexpr, BASE: tl.constexpr, IS_ONCE: tl.constexpr, HAS_MINIMA: tl.constexpr,
    ROUNDS: tl.constexpr, WHOLE: tl.constexpr, IS_TURNED: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """total plus the product of a step: one chunk of inputs, or two of 4-bit numbers."""
    kind = source.dtype.element_ty
    if NUMBER == "int4" or NUMBER == "e2m1":
        first, _ = _part_of(source, units, 2 * step, inputs, CHUNK, WHOLE, ROUNDS)
        second, _ = _part_of(source, units, 2 * step + 1, inputs, CHUNK, WHOLE, ROUNDS)
        if NUMBER == "int4":
            lower, upper = opened_pair(codes, kind, BASE, ASSEMBLY)
        else:
            lower, upper = _floats_of(codes, kind, ASSEMBLY)
        total = _with_chunk(
            total, first, units, lower, scale, low,
            IS_ONCE, HAS_MINIMA, ROUNDS, IS_TURNED, PRECISION,
        )  # fmt: skip
        total = _with_chunk(
            total, second, units, upper, other_scale, other_low,
            IS_ONCE, HAS_MINIMA, ROUNDS, IS_TURNED, PRECISION,
        )  # fmt: skip
    else:
        part, unit = _part_of(source, units, step, inputs, CHUNK, WHOLE, ROUNDS)
        if NUMBER == "int8":
            codes = opened(codes, kind, ASSEMBLY)
        elif ROUNDS == "":
            codes = codes.to(kind)
        total = _with_chunk(
            total, part, unit, codes, scale, low,
            IS_ONCE, HAS_MINIMA, ROUNDS, IS_TURNED, PRECISION,
        )  # fmt: skip
    return total


@triton.jit
def _factors(
    scales, minima, step, inputs, per_group, wide, HAS_SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, PAIRED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scales and minima of the chunks of a step; 0 = there are none. They are loaded a step ahead,
    because only operands of products are loaded ahead by the compiler."""
    scale = tl.full([], 0.0, tl.float32)
    low, other_scale, other_low = scale, scale, scale
    if HAS_SCALES:
        last = (inputs - 1) // CHUNK
        chunk = tl.minimum(2 * step if PAIRED else step, last)
        at = chunk // per_group * wide
        scale = _factor_of(scales, at)
        if HAS_MINIMA:
            low = _factor_of(minima, at)
        if PAIRED:
            at = tl.minimum(chunk + 1, last) // per_group * wide
            other_scale = _factor_of(scales, at)
            if HAS_MINIMA:
                other_low = _factor_of(minima, at)
    return scale, low, other_scale, other_low


@triton.jit
def expert_product(
    x, x_units, numbers, scales, minima, units, bias, order, block_experts, block_firsts,
    block_ends, total, out, ids, first, experts, x_row, inputs, outputs, filled, steps, groups,
    per_group, wide, per_token, limit, alpha, ALONE: tl.constexpr, GATE: tl.constexpr,
    NUMBER: tl.constexpr, BASE: tl.constexpr, SHARED: tl.constexpr, IS_ONCE: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr, IS_TURNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of a projection for a block of rows of one expert.

    With a GATE it is the first one: act(gate(x)) · up(x), or relu(up(x))²; x: [tokens, inputs],
    out: [rows, half of the outputs or all]. Without, it is the second one; x: [rows, inputs],
    out: [pairs, outputs], stored at the rows' pairs.

    filled: outputs in memory; steps: of inputs; groups: of inputs with factors of their own;
    per_group: chunks of a group; wide: factors of a group.
    """
    tiles = tl.cdiv(outputs, COLUMNS)
    block = tl.program_id(0) // tiles
    expert = _expert_of(ids, block_experts, total, block, first, experts, ALONE)
    if expert < 0:
        return
    row, is_row, pair = _rows_of(order, block_firsts, block_ends, block, ALONE, ROWS)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    if GATE == "":
        given = tl.where(is_row, row, tl.min(row, 0)).to(tl.int64)
    else:
        given = (pair // per_token).to(tl.int64)
    source = x + given * x_row
    its_units = x_units + given * (x_row // CHUNK)
    size = (filled * CHUNK).to(tl.int64)
    lines = numbers + expert * steps * size
    lines = lines + column[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    sides: tl.constexpr = 2 if GATE != "" and GATE != "relu2" else 1
    place = column // (sides * SHARED) * sides + column % sides if SHARED > 1 else column
    scales += expert * groups * wide + place
    minima += expert * groups * wide + place
    paired: tl.constexpr = NUMBER == "int4" or NUMBER == "e2m1"
    if IS_TURNED:
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    scale, low, other, other_low = _factors(
        scales, minima, 0, inputs, per_group, wide, HAS_SCALES, HAS_MINIMA, paired, CHUNK
    )
    for step in range(0, steps):
        codes = tl.load(lines + step * size)
        next_scale, next_low, next_other, next_other_low = _factors(
            scales, minima, step + 1, inputs, per_group, wide, HAS_SCALES, HAS_MINIMA, paired, CHUNK
        )
        sums = _with_step(
            sums, source, its_units, codes, step, inputs, scale, low, other, other_low, NUMBER,
            BASE, IS_ONCE, HAS_MINIMA, ROUNDS, WHOLE, IS_TURNED, CHUNK, PRECISION, ASSEMBLY,
        )  # fmt: skip
        scale, low, other, other_low = next_scale, next_low, next_other, next_other_low
    if IS_TURNED:
        sums = tl.trans(sums)
    if IS_ONCE and HAS_SCALES:
        sums *= scale[None, :]
    if HAS_UNITS:
        sums *= tl.load(units + expert * filled + column)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + expert * filled + column)[None, :]
    if GATE == "":
        is_inside = is_row[:, None] & (column < outputs)[None, :]
        where = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(where, sums.to(out.dtype.element_ty), mask=is_inside)
    else:
        if GATE == "relu2":
            made = tl.maximum(sums, 0.0) * tl.maximum(sums, 0.0)
        else:
            gate, up = tl.split(tl.reshape(sums, [ROWS, COLUMNS // 2, 2]))
            made = _opened(gate, up, limit, alpha, GATE)
        inner = outputs // sides
        width: tl.constexpr = COLUMNS // sides
        at = (tl.program_id(0) % tiles) * width + tl.arange(0, width)
        where = out + row.to(tl.int64)[:, None] * inner + at[None, :]
        tl.store(where, made.to(out.dtype.element_ty), mask=is_row[:, None] & (at < inner)[None, :])


@triton.jit
def _turn_of(rank, expert, choice, turn):
    """The expert whose turn it is, and its choice."""
    is_it = rank == turn
    return tl.sum(tl.where(is_it, expert, 0), 0), tl.sum(tl.where(is_it, choice, 0), 0)


@triton.jit
def outer_of_one(
    x, numbers, scales, minima, units, bias, weights, out, ids, first, experts, inputs, outputs,
    filled, steps, groups, per_group, wide, PER_TOKEN: tl.constexpr, CHOICES: tl.constexpr,
    NUMBER: tl.constexpr, BASE: tl.constexpr, SHARED: tl.constexpr, IS_ONCE: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Some outputs of the second projection of a single token, summed over its experts as in
    `add_up`. One loop runs over the steps of all experts, so that loads never pause.
    x: [PER_TOKEN, inputs]; out: [outputs]"""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    choice = tl.arange(0, CHOICES)
    expert = tl.load(ids + choice, mask=choice < PER_TOKEN, other=-1) - first
    factor = tl.load(weights + choice, mask=choice < PER_TOKEN, other=0.0)
    is_here = (expert >= 0) & (expert < experts)
    key = tl.where(is_here, expert, choice.to(tl.int64) + 4611686018427387904)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    count = tl.sum(is_here.to(tl.int32), 0)
    size = (filled * CHUNK).to(tl.int64)
    lines = numbers + column[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    place = column // SHARED
    paired: tl.constexpr = NUMBER == "int4" or NUMBER == "e2m1"
    every = tl.zeros([ROWS], tl.int64)
    answer = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    end = count * steps
    number, which = _turn_of(rank, expert, choice, 0)
    where = number * groups * wide + place
    scale, low, other, other_low = _factors(
        scales + where, minima + where, 0, inputs, per_group, wide, HAS_SCALES, HAS_MINIMA,
        paired, CHUNK,
    )  # fmt: skip
    for at in range(0, end):
        step, turn = at % steps, at // steps
        number, which = _turn_of(rank, expert, choice, turn)
        codes = tl.load(lines + (number * steps + step) * size)
        after, _ = _turn_of(rank, expert, choice, tl.minimum(at + 1, end - 1) // steps)
        where = after * groups * wide + place
        next_scale, next_low, next_other, next_other_low = _factors(
            scales + where, minima + where, (at + 1) % steps, inputs, per_group, wide,
            HAS_SCALES, HAS_MINIMA, paired, CHUNK,
        )  # fmt: skip
        source = x + every + which * inputs
        sums = _with_step(
            sums, source, source, codes, step, inputs, scale, low, other, other_low, NUMBER, BASE,
            IS_ONCE, HAS_MINIMA, ROUNDS, WHOLE, False, CHUNK, PRECISION, ASSEMBLY,
        )  # fmt: skip
        is_last = step == steps - 1
        made = sums
        if IS_ONCE and HAS_SCALES:
            made *= scale[None, :]
        if HAS_UNITS:
            made *= tl.load(units + number * filled + column, mask=is_last, other=0.0)[None, :]
        if HAS_BIAS:
            made += tl.load(bias + number * filled + column, mask=is_last, other=0.0)[None, :]
        value = made.to(out.dtype.element_ty).to(tl.float32)
        share = tl.sum(tl.where(rank == turn, factor, 0.0), 0)
        answer += tl.where(is_last, share * value, 0.0)
        sums = tl.where(is_last, 0.0, sums)
        scale, low, other, other_low = next_scale, next_low, next_other, next_other_low
    row = tl.arange(0, ROWS)
    where_to = out + every[:, None] + column[None, :]
    tl.store(
        where_to, answer.to(out.dtype.element_ty), mask=(row == 0)[:, None] & is_column[None, :]
    )


@triton.jit
def round_rows(x, out, units, x_row, inputs, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Some chunks of a row as 8-bit floats with a factor each. out: [rows, inputs]; units: [rows,
    inputs / CHUNK]; the chunks are whole."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = at < inputs
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    made, unit = rounded(values)
    tl.store(out + row * inputs + at, made, mask=inside)
    tl.store(units + row * (inputs // CHUNK) + chunk, unit, mask=chunk * CHUNK < inputs)


@triton.jit
def add_up(
    x, ids, weights, out, first, last, home, width,
    PER_TOKEN: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one token: the sum of weight · x over its experts, in the order of their numbers.
    Sums are taken within each group of `home` experts, then over the groups. Experts outside first
    … last − 1 add nothing. x: [tokens, PER_TOKEN, width]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    choice = tl.arange(0, CHOICES)
    is_choice = choice < PER_TOKEN
    expert = tl.load(ids + token * PER_TOKEN + choice, mask=is_choice, other=0)
    factor = tl.load(weights + token * PER_TOKEN + choice, mask=is_choice, other=0.0)
    key = tl.where(is_choice, expert * CHOICES + choice, 9223372036854775807)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    sums = tl.zeros([BLOCK], tl.float32)
    mine = tl.zeros([BLOCK], tl.float32)
    before = tl.full([], -1, tl.int64)
    for place in tl.static_range(PER_TOKEN):
        is_next = (rank == place) & is_choice
        which = tl.sum(tl.where(is_next, choice, 0), 0)
        number = tl.sum(tl.where(is_next, expert, 0), 0)
        weight = tl.sum(tl.where(is_next, factor, 0.0), 0)
        is_here = (number >= first) & (number < last)
        line = x + (token * PER_TOKEN + which) * width
        value = tl.load(line + at, mask=inside & is_here, other=0.0).to(tl.float32)
        at_home = number // home
        is_new = at_home != before
        sums = tl.where(is_new, sums + mine, sums)
        mine = tl.where(is_new, 0.0, mine) + tl.where(is_here, weight * value, 0.0)
        before = at_home
    tl.store(out + token * width + at, (sums + mine).to(out.dtype.element_ty), mask=inside)
