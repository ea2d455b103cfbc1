"""Triton kernels of layers that keep a state. Imported on first use, because Triton may be missing.

A program has one row and a part of its state, which stays in registers while the row's tokens are
taken in one after another. So a token has the same bits wherever its prompt was cut. Rows, pages
and lengths are read on the device, and a row at position 0 reads no state.
"""

import triton
import triton.language as tl

from banyan.ops.cuda.attention_kernels import row_of


@triton.jit
def _is_new(context_lengths, row):
    return tl.load(context_lengths + row) == 0


@triton.jit
def _shift(
    x, last_inputs, place, target, start, count, channel, is_channel, is_new, x_token, state_tap,
    TAPS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store the newest TAPS − 1 inputs after `count` tokens of a row. place, target: of its state
    before and after them."""
    kept = tl.arange(0, KEPT)
    source = kept + count - (TAPS - 1)  # among the row's tokens of this step; before them < 0
    is_kept = (kept < TAPS - 1)[:, None] & is_channel[None, :]
    is_given = is_kept & (source >= 0)[:, None]
    at = (start + source).to(tl.int64)[:, None] * x_token + channel[None, :]
    given = tl.load(x + at, mask=is_given, other=0.0).to(tl.float32)
    older = place + (kept + count)[:, None] * state_tap + channel[None, :]
    is_old = is_kept & (source < 0)[:, None] & (is_new == 0)
    moved = tl.load(last_inputs + older, mask=is_old, other=0.0)
    tl.debug_barrier()  # other threads have read what is overwritten now
    stored = last_inputs + target + kept[:, None] * state_tap + channel[None, :]
    tl.store(stored, given + moved, mask=is_kept)


@triton.jit
def _move_on(
    x, last_inputs, place, start, count, channel, is_channel, is_new, x_token, state_page,
    state_tap, checkpoints, HAS_CHECKPOINTS: tl.constexpr, TAPS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store a row's state after its tokens, and after each of the drafts among them. checkpoints:
    of the row, a first page and a number of pages."""
    if HAS_CHECKPOINTS:
        first, drafts = tl.load(checkpoints).to(tl.int64), tl.load(checkpoints + 1)
        for at in range(0, drafts):
            _shift(
                x, last_inputs, place, (first + at) * state_page, start, count - drafts + at,
                channel, is_channel, is_new, x_token, state_tap, TAPS, KEPT,
            )  # fmt: skip
    _shift(
        x, last_inputs, place, place, start, count, channel, is_channel, is_new, x_token,
        state_tap, TAPS, KEPT,
    )  # fmt: skip


@triton.jit
def convolve(
    x, weight, bias, out, last_inputs, pages, row_starts, context_lengths, checkpoints, rows,
    channels, x_token, weight_tap, state_page, state_tap, pages_row,
    HAS_CHECKPOINTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    TAPS: tl.constexpr, KEPT: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Some channels of TOKENS tokens of a row; or of a whole row, whose state it then moves on."""
    block = tl.program_id(0)
    row = block if IS_WHOLE else row_of(row_starts, rows, block, TOKENS)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    begin, end = 0, count
    if not IS_WHOLE:
        begin = (block - (start // TOKENS + row)) * TOKENS
        end = tl.minimum(begin + TOKENS, count)
    if begin >= end:
        return
    is_new = _is_new(context_lengths, row)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    place = tl.load(pages + row * pages_row).to(tl.int64) * state_page
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_there = (token < end)[:, None] & is_channel[None, :]
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
        for tap in tl.static_range(TAPS):
            source = token - (TAPS - 1) + tap
            at = (start + source).to(tl.int64)[:, None] * x_token + channel[None, :]
            given = tl.load(x + at, mask=is_there & (source >= 0)[:, None], other=0.0)
            older = place + (source + TAPS - 1)[:, None] * state_tap + channel[None, :]
            is_old = is_there & (source < 0)[:, None] & (is_new == 0)
            value = given.to(tl.float32) + tl.load(last_inputs + older, mask=is_old, other=0.0)
            factor = tl.load(weight + tap * weight_tap + channel, mask=is_channel, other=0.0)
            total += factor[None, :] * value
        if HAS_SILU:
            total = total * tl.sigmoid(total)
        at = (start + token).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=is_there)
    if IS_WHOLE:
        _move_on(
            x, last_inputs, place, start, count, channel, is_channel, is_new, x_token, state_page,
            state_tap, checkpoints + 2 * row, HAS_CHECKPOINTS, TAPS, KEPT,
        )  # fmt: skip


@triton.jit
def shift_inputs(
    x, last_inputs, pages, row_starts, context_lengths, checkpoints, channels, x_token, state_page,
    state_tap, pages_row, HAS_CHECKPOINTS: tl.constexpr, TAPS: tl.constexpr, KEPT: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of a row: move its state on, after `convolve` has run."""
    row = tl.program_id(0)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    if count <= 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.load(pages + row * pages_row).to(tl.int64) * state_page
    is_new = _is_new(context_lengths, row)
    _move_on(
        x, last_inputs, place, start, count, channel, channel < channels, is_new, x_token,
        state_page, state_tap, checkpoints + 2 * row, HAS_CHECKPOINTS, TAPS, KEPT,
    )  # fmt: skip


@triton.jit
def decay(
    x, bias, rate, step, kept, x_token, size, low, high, BLOCK: tl.constexpr
):  # fmt: skip
    """softplus(x + bias) within bounds, and exp(−rate · that), of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < size
    value = tl.load(x + token * x_token + at, mask=is_there, other=0.0).to(tl.float32)
    value += tl.load(bias + at, mask=is_there, other=0.0)
    small = tl.exp(tl.minimum(value, 20.0))
    more = 1.0 + small
    # log(1 + small): the quotient restores the digits that the sum has lost
    exact = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1, 1, more - 1)))
    moved = tl.where(value > 20.0, value, exact)
    moved = tl.minimum(tl.maximum(moved, low), high)
    left = tl.exp(-tl.load(rate + at, mask=is_there, other=0.0) * moved)
    tl.store(step + token * size + at, moved, mask=is_there)
    tl.store(kept + token * size + at, left, mask=is_there)


@triton.jit
def gate_rows(
    x, gate, out, x_token, x_part, gate_token, gate_part, size,
    CURVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x · curve(gate) of one token. CURVE: 0 none, 1 silu, 2 sigmoid, 3 relu."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < size
    value = tl.load(x + token * x_token + at * x_part, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(gate + token * gate_token + at * gate_part, mask=is_there, other=0.0)
    factor = factor.to(tl.float32)
    if CURVE == 1:
        factor = factor * tl.sigmoid(factor)
    elif CURVE == 2:
        factor = tl.sigmoid(factor)
    elif CURVE == 3:
        factor = tl.maximum(factor, 0.0)
    tl.store(out + token * size + at, (value * factor).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _keep(states, place, state, is_state, state_page, token, end, checkpoint, drafts):
    """Store the state after a token, if the tokens after it are all drafts. place: of the state in
    its page; checkpoint: the page after the first draft's past."""
    at = token - (end - 1 - drafts)
    target = states + (checkpoint + at) * state_page + place
    tl.store(target, state, mask=is_state & (at >= 0) & (at < drafts))


@triton.jit
def _numbers(base, at, is_there):
    return tl.load(base + at, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def scan_rows(
    q, k, v, kept, strength, skip, out, states, pages, row_starts, context_lengths, checkpoints,
    q_token, q_head, k_token, k_head, v_token, v_head, kept_token, kept_head, strength_token,
    state_page, state_head, state_key, pages_row, heads, shared, key_dim, value_dim,
    HAS_CHECKPOINTS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_SKIP: tl.constexpr,
    BY_KEY: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Some value dimensions of one head of a row: `Ops.scan`. Each token's numbers are loaded while
    the token before is computed."""
    row, head = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start >= end:
        return
    dims, at = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_dim, is_value = dims < key_dim, at < value_dim
    is_state = is_dim[:, None] & is_value[None, :]
    inside = head * state_head + dims[:, None] * state_key + at[None, :]
    place = states + tl.load(pages + row * pages_row).to(tl.int64) * state_page + inside
    checkpoint, drafts = tl.full([], 0, tl.int64), 0
    if HAS_CHECKPOINTS:
        checkpoint = tl.load(checkpoints + 2 * row).to(tl.int64)
        drafts = tl.load(checkpoints + 2 * row + 1)
    is_new = _is_new(context_lengths, row)
    state = tl.load(place, mask=is_state & (is_new == 0), other=0.0)
    key_head = head // shared
    here = start.to(tl.int64)
    q_at, k_at = q + here * q_token + key_head * q_head, k + here * k_token + key_head * k_head
    v_at, kept_at = v + here * v_token + head * v_head, kept + here * kept_token + head * kept_head
    strength_at = strength + here * strength_token + head
    out_at = out + (here * heads + head) * value_dim + at
    query, key = _numbers(q_at, dims, is_dim), _numbers(k_at, dims, is_dim)
    value, force = _numbers(v_at, at, is_value), tl.load(strength_at).to(tl.float32)
    left = _numbers(kept_at, dims, is_dim) if BY_KEY else tl.load(kept_at)
    factor = tl.load(skip + head) if HAS_SKIP else 0.0
    for token in range(start, end):
        is_more = token + 1 < end
        q_at, k_at, v_at = q_at + q_token, k_at + k_token, v_at + v_token
        kept_at, strength_at = kept_at + kept_token, strength_at + strength_token
        next_query = _numbers(q_at, dims, is_dim & is_more)
        next_key = _numbers(k_at, dims, is_dim & is_more)
        next_value = _numbers(v_at, at, is_value & is_more)
        next_force = tl.load(strength_at, mask=is_more, other=0.0).to(tl.float32)
        if BY_KEY:
            next_left = _numbers(kept_at, dims, is_dim & is_more)
            state = state * left[:, None]
        else:
            next_left = tl.load(kept_at, mask=is_more, other=0.0)
            state = state * left
        if HAS_DELTA:
            added = tl.sigmoid(force) * (value - tl.sum(key[:, None] * state, 0))
        else:
            added = force * value
        state += key[:, None] * added[None, :]
        read = tl.sum(query[:, None] * state, 0)
        if HAS_SKIP:
            read += factor * value
        tl.store(out_at, read.to(out.dtype.element_ty), mask=is_value)
        out_at += heads * value_dim
        if HAS_CHECKPOINTS:
            _keep(states, inside, state, is_state, state_page, token, end, checkpoint, drafts)
        query, key, value, force, left = next_query, next_key, next_value, next_force, next_left
    tl.store(place, state, mask=is_state)


@triton.jit
def scan_channels(
    q, k, v, step, rate, skip, out, states, pages, row_starts, context_lengths, checkpoints,
    q_token, k_token, v_token, step_token, rate_key, state_page, state_key, pages_row, key_dim,
    channels, HAS_CHECKPOINTS: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of a row: `Ops.selective_scan`. Loads as in `scan_rows`."""
    row = tl.program_id(1)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start >= end:
        return
    dims, at = tl.arange(0, KEYS), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_dim, is_channel = dims < key_dim, at < channels
    is_state = is_dim[:, None] & is_channel[None, :]
    inside = dims[:, None] * state_key + at[None, :]
    place = states + tl.load(pages + row * pages_row).to(tl.int64) * state_page + inside
    checkpoint, drafts = tl.full([], 0, tl.int64), 0
    if HAS_CHECKPOINTS:
        checkpoint = tl.load(checkpoints + 2 * row).to(tl.int64)
        drafts = tl.load(checkpoints + 2 * row + 1)
    is_new = _is_new(context_lengths, row)
    state = tl.load(place, mask=is_state & (is_new == 0), other=0.0)
    rates = tl.load(rate + dims[:, None] * rate_key + at[None, :], mask=is_state, other=0.0)
    factor = tl.load(skip + at, mask=is_channel, other=0.0)
    here = start.to(tl.int64)
    q_at, k_at, v_at = q + here * q_token, k + here * k_token, v + here * v_token
    step_at, out_at = step + here * step_token, out + here * channels + at
    query, key = _numbers(q_at, dims, is_dim), _numbers(k_at, dims, is_dim)
    value, moved = _numbers(v_at, at, is_channel), _numbers(step_at, at, is_channel)
    for token in range(start, end):
        is_more = token + 1 < end
        q_at, k_at, v_at = q_at + q_token, k_at + k_token, v_at + v_token
        step_at += step_token
        next_query = _numbers(q_at, dims, is_dim & is_more)
        next_key = _numbers(k_at, dims, is_dim & is_more)
        next_value = _numbers(v_at, at, is_channel & is_more)
        next_moved = _numbers(step_at, at, is_channel & is_more)
        state = tl.exp(-rates * moved[None, :]) * state + key[:, None] * (moved * value)[None, :]
        read = tl.sum(query[:, None] * state, 0) + factor * value
        tl.store(out_at, read.to(out.dtype.element_ty), mask=is_channel)
        out_at += channels
        if HAS_CHECKPOINTS:
            _keep(states, inside, state, is_state, state_page, token, end, checkpoint, drafts)
        query, key, value, moved = next_query, next_key, next_value, next_moved
    tl.store(place, state, mask=is_state)
