"""Triton kernels of experts. Imported on first use, because Triton may be missing.

(token, expert) pairs are numbered token · per_token + choice. `order_pairs` sorts them by expert
and cuts each expert's pairs into blocks of rows; a block uses one expert's weights only. The grids
depend only on the numbers of pairs and experts, so no launch waits for the router's choice, and
launches can be captured.
"""

import triton
import triton.language as tl


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
def _multiplied(
    total, x, weight, begin, width, steps, WHOLE: tl.constexpr, PRECISION: tl.constexpr
):
    """total plus one step of x · weightᵀ. x: pointers [rows, steps]; weight: [steps, columns]."""
    if WHOLE:
        values, factors = tl.load(x + begin), tl.load(weight + begin)
    else:
        is_in = begin + steps < width
        values = tl.load(x + begin, mask=is_in[None, :], other=0.0)
        factors = tl.load(weight + begin, mask=is_in[:, None], other=0.0)
    return tl.dot(values, factors, total, input_precision=PRECISION)


@triton.jit
def expert_inner(
    x, weight, bias, order, block_experts, block_firsts, block_ends, total, out,
    ids, first, experts, x_row, dim, inner, per_token, limit, alpha, ALONE: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some columns of a block of rows: act(gate(x)) · up(x), or relu(up(x))².
    weight: [experts, 2 · inner, dim], the gates first, or [experts, inner, dim]."""
    tiles = tl.cdiv(inner, COLUMNS)
    block = tl.program_id(0) // tiles
    expert = _expert_of(ids, block_experts, total, block, first, experts, ALONE)
    if expert < 0:
        return
    row, is_row, pair = _rows_of(order, block_firsts, block_ends, block, ALONE, BLOCK)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < inner
    steps = tl.arange(0, STEP)
    source = x + (pair // per_token).to(tl.int64)[:, None] * x_row + steps[None, :]
    outputs: tl.constexpr = 1 if GATE == "relu2" else 2
    own = weight + expert * outputs * inner * dim
    lines = own + (column % inner).to(tl.int64)[None, :] * dim + steps[:, None]
    up = tl.zeros([BLOCK, COLUMNS], tl.float32)
    if GATE == "relu2":
        for begin in range(0, dim, STEP):
            up = _multiplied(up, source, lines, begin, dim, steps, WHOLE, PRECISION)
    else:
        gate = tl.zeros([BLOCK, COLUMNS], tl.float32)
        second = lines + inner.to(tl.int64) * dim
        for begin in range(0, dim, STEP):
            if WHOLE:
                values = tl.load(source + begin)
                of_gate, of_up = tl.load(lines + begin), tl.load(second + begin)
            else:
                is_in = begin + steps < dim
                values = tl.load(source + begin, mask=is_in[None, :], other=0.0)
                of_gate = tl.load(lines + begin, mask=is_in[:, None], other=0.0)
                of_up = tl.load(second + begin, mask=is_in[:, None], other=0.0)
            gate = tl.dot(values, of_gate, gate, input_precision=PRECISION)
            up = tl.dot(values, of_up, up, input_precision=PRECISION)
    if HAS_BIAS:
        its = bias + expert * outputs * inner + column
        up += tl.load(its + (outputs - 1) * inner, mask=is_column, other=0.0)[None, :]
    if GATE == "relu2":
        result = tl.maximum(up, 0.0) * tl.maximum(up, 0.0)
    else:
        if HAS_BIAS:
            gate += tl.load(its, mask=is_column, other=0.0)[None, :]
        result = _opened(gate, up, limit, alpha, GATE)
    place = out + row.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def expert_outer(
    x, weight, bias, order, block_experts, block_firsts, block_ends, total, out,
    ids, first, experts, dim, inner, ALONE: tl.constexpr,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some columns of the second projection for a block of rows, stored at the rows' pairs.
    x: [rows, inner]; weight: [experts, dim, inner]; out: [pairs, dim]."""
    tiles = tl.cdiv(dim, COLUMNS)
    block = tl.program_id(0) // tiles
    expert = _expert_of(ids, block_experts, total, block, first, experts, ALONE)
    if expert < 0:
        return
    row, is_row, pair = _rows_of(order, block_firsts, block_ends, block, ALONE, BLOCK)
    pair = pair.to(tl.int64)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < dim
    steps = tl.arange(0, STEP)
    given = tl.where(is_row, row, tl.min(row, 0)).to(tl.int64)
    source = x + given[:, None] * inner + steps[None, :]
    own = weight + expert * dim * inner
    lines = own + (column % dim).to(tl.int64)[None, :] * inner + steps[:, None]
    result = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for begin in range(0, inner, STEP):
        result = _multiplied(result, source, lines, begin, inner, steps, WHOLE, PRECISION)
    if HAS_BIAS:
        result += tl.load(bias + expert * dim + column, mask=is_column, other=0.0)[None, :]
    place = out + pair[:, None] * dim + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


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
