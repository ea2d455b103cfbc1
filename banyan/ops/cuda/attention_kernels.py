"""Triton kernels of attention over pages. Imported on first use, because Triton may be missing.

Numbers are read in their stored type, 8-bit ones in their unit. Logits, weights and sums are fp32;
exponentials have base 2. The state of a query's softmax is (best, total, result): the largest
logit, the sum of the weights relative to it, and the weighted sum of values (Milakov and
Gimelshein, arXiv 1805.02867).
"""

import triton
import triton.language as tl


@triton.jit
def row_of(row_starts, rows, block, PER_BLOCK: tl.constexpr):
    """The row of a block of queries. Row r begins at block row_starts[r] // PER_BLOCK + r; the last
    blocks of a row may be empty."""
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
def keys_or_values(
    pages, tiles, page_stride, token_stride, tables, begin, length, is_key, kv_head,
    IS_TILED: tl.constexpr, IS_MASKED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS, BLOCK_D] of one head and row from `begin` on; tiles read what masked positions have,
    pointers read zeros there.

    pages: of this head; tiles: all of them as lines of all heads of a token; tables: the row's."""
    key, dims = tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    if PAGE % KEYS == 0:  # one page has them all
        if IS_MASKED:
            page = tl.load(tables + begin // PAGE, mask=begin < length, other=0)
        else:
            page = tl.load(tables + begin // PAGE)
        key = begin % PAGE + key
    else:
        if IS_MASKED:
            page = tl.load(tables + (begin + key) // PAGE, mask=is_key, other=0)
        else:
            page = tl.load(tables + (begin + key) // PAGE)
        key = (begin + key) % PAGE
    if IS_TILED:
        found = tiles.load([page * PAGE + begin % PAGE, kv_head * HEAD_DIM])
    else:
        at = page.to(tl.int64) * page_stride + key * token_stride
        where = pages + at[:, None] + dims[None, :]
        if IS_MASKED:
            mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
            found = tl.load(where, mask=mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            found = tl.load(where)
        else:
            found = tl.load(where, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return found


@triton.jit
def scales_of(
    scales, page_stride, token_stride, tables, begin, is_key, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """[KEYS] fp32 of pages of bytes; a head's scale follows its numbers (`ops/pages.py`)."""
    key = begin + tl.arange(0, KEYS)
    page = tl.load(tables + key // PAGE, mask=is_key, other=0)
    at = page.to(tl.int64) * (page_stride // 4) + key % PAGE * (token_stride // 4)
    return tl.load(scales + at, mask=is_key, other=0.0)


@triton.jit
def see(
    query, best, total, result, begin, lowest, length, position, last, tables, kv_head,
    k_pages, k_tiles, k_scales, k_page, k_token, v_pages, v_tiles, v_scales, v_page, v_token,
    scale, soft_cap, window,
    IS_MASKED: tl.constexpr, IS_TILED: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The softmax state after KEYS more keys. Without a mask every query sees all of them.

    last: newest position that each query sees, its own or a later one; k_scales, v_scales: of this
    head, used with HAS_SCALES."""
    key = begin + tl.arange(0, KEYS)
    is_key = (key >= lowest) & (key < length)
    k = keys_or_values(
        k_pages, k_tiles, k_page, k_token, tables, begin, length, is_key, kv_head,
        IS_TILED, IS_MASKED, PAGE, HEAD_DIM, BLOCK_D, KEYS,
    )  # fmt: skip
    logit = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
    factor = scale
    if HAS_SCALES:
        found = scales_of(k_scales, k_page, k_token, tables, begin, is_key, PAGE, KEYS)
        logit = logit * (found * scale)[None, :]
        factor = 1.0
    if HAS_CAP:
        logit = capped(logit * factor, soft_cap) * 1.4426950408889634
        factor = 1.0
    if IS_MASKED:
        is_seen = is_key[None, :] & (key[None, :] <= last[:, None])
        if window > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - window)
        logit = tl.where(is_seen, logit, float("-inf"))
    larger = tl.maximum(best, tl.max(logit, 1) * factor)
    base = larger
    if IS_MASKED:
        base = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(logit * factor - base[:, None])
    kept = tl.exp2(best - base)
    total = total * kept + tl.sum(weight, 1)
    v = keys_or_values(
        v_pages, v_tiles, v_page, v_token, tables, begin, length, is_key, kv_head,
        IS_TILED, IS_MASKED, PAGE, HEAD_DIM, BLOCK_D, KEYS,
    ).to(query.dtype)  # fmt: skip
    if IS_TILED and IS_MASKED:  # a weight of zero does not undo what is no number
        v = tl.where(is_key[:, None], v, 0.0)
    if HAS_SCALES:
        found = scales_of(v_scales, v_page, v_token, tables, begin, is_key, PAGE, KEYS)
        weight = weight * found[None, :]
    result = result * kept[:, None]
    result = tl.dot(weight.to(query.dtype), v, result, input_precision="ieee")
    return larger, total, result


@triton.jit
def attend(
    q, k_pages, v_pages, k_tiles, v_tiles, k_scales, v_scales, page_tables, row_starts,
    context_lengths, out, sinks, scale, soft_cap, unit, rows, q_token, q_head, k_page, k_token,
    k_head, v_page, v_token, v_head, table_row, out_token, out_head, window, ends,
    IS_TILED: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_ENDS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one kv head: some tokens of a row times its query heads."""
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
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
    is_own = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = (start + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    query = tl.load(q + q_at, mask=is_own, other=0.0)
    position = context + token
    length = context + tl.minimum(first + PER_BLOCK, count)
    last = position
    if HAS_ENDS:
        last = tl.maximum(last, tl.load(ends + start + token, mask=is_query, other=0) - 1)
        length = tl.maximum(length, tl.max(tl.where(is_query, last, 0)) + 1)
    lowest, all_from = tl.maximum(0, -window), tl.maximum(0, -window)
    if window > 0:
        lowest = tl.maximum(0, context + first - window + 1)
        all_from = tl.maximum(0, context + first + PER_BLOCK - window)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:  # a logit without a value
        best = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    k_at, v_at = kv_head * k_head, kv_head * v_head
    if HAS_SCALES:
        k_at, v_at = tl.multiple_of(k_at, 4), tl.multiple_of(v_at, 4)
    k_of, v_of = k_pages + k_at, v_pages + v_at
    k_scales_of = k_scales + (kv_head * k_head + HEAD_DIM) // 4
    v_scales_of = v_scales + (kv_head * v_head + HEAD_DIM) // 4
    # Blocks of keys that all queries see, then those at both ends, which some do not see.
    begin = lowest // KEYS * KEYS
    inner = tl.minimum(tl.cdiv(all_from, KEYS), tl.cdiv(length, KEYS)) * KEYS
    outer = tl.maximum((context + first + 1) // KEYS * KEYS, inner)
    early = (inner - begin) // KEYS
    for at_key in range(inner, outer, KEYS):
        best, total, result = see(
            query, best, total, result, at_key, lowest, length, position, last, tables, kv_head,
            k_of, k_tiles, k_scales_of, k_page, k_token, v_of, v_tiles, v_scales_of, v_page,
            v_token, scale, soft_cap, window,
            False, IS_TILED, HAS_SCALES, HAS_CAP, PAGE, HEAD_DIM, BLOCK_D, KEYS,
        )  # fmt: skip
    for at_edge in tl.range(0, early + tl.cdiv(length - outer, KEYS), num_stages=1):
        at_key = begin + at_edge * KEYS
        if at_edge >= early:
            at_key = outer + (at_edge - early) * KEYS
        best, total, result = see(
            query, best, total, result, at_key, lowest, length, position, last, tables, kv_head,
            k_of, k_tiles, k_scales_of, k_page, k_token, v_of, v_tiles, v_scales_of, v_page,
            v_token, scale, soft_cap, window,
            True, IS_TILED, HAS_SCALES, HAS_CAP, PAGE, HEAD_DIM, BLOCK_D, KEYS,
        )  # fmt: skip
    result = result / tl.where(total > 0, total, 1.0)[:, None] * unit
    out_at = (start + token).to(tl.int64)[:, None] * out_token
    out_at += head[:, None] * out_head + dims[None, :]
    tl.store(out + out_at, result.to(query.dtype), mask=is_own)


@triton.jit
def merged(best, total, result, more_best, more_total, more_result):
    """The softmax state of two parts of the keys, in key order."""
    larger = tl.maximum(best, more_best)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    kept, taken = tl.exp2(best - base), tl.exp2(more_best - base)
    total = total * kept + more_total * taken
    result = result * kept[:, None] + more_result * taken[:, None]
    return larger, total, result


@triton.jit
def attend_rows(
    q, k_pages, v_pages, k_tiles, v_tiles, k_scales, v_scales, page_tables, context_lengths, out,
    sinks, bests, totals, results, scale, soft_cap, unit, heads, parts, programs, q_token, q_head,
    k_page, k_token, k_head, v_page, v_token, v_head, table_row, out_token, out_head, window,
    IS_TILED: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows of one token: the query heads of one kv head. Keys are processed in parts of PART, and
    the parts are merged in order, by this program or, if they are split, by `merge`. So a result
    does not depend on the number of programs."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    position = tl.load(context_lengths + row)
    length = position + 1
    row = row.to(tl.int64)
    tables = page_tables + row * table_row
    at = tl.arange(0, BLOCK)
    head, is_query = kv_head * GROUP + at, at < GROUP
    dims = tl.arange(0, BLOCK_D)
    is_own = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        q + row * q_token + head[:, None] * q_head + dims[None, :], mask=is_own, other=0.0
    )
    positions = position + tl.zeros([BLOCK], tl.int32)
    lowest = tl.maximum(0, -window)
    if window > 0:
        lowest = tl.maximum(0, length - window)
    k_at, v_at = kv_head * k_head, kv_head * v_head
    if HAS_SCALES:
        k_at, v_at = tl.multiple_of(k_at, 4), tl.multiple_of(v_at, 4)
    k_of, v_of = k_pages + k_at, v_pages + v_at
    k_scales_of = k_scales + (kv_head * k_head + HEAD_DIM) // 4
    v_scales_of = v_scales + (kv_head * v_head + HEAD_DIM) // 4
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:  # a logit without a value
        best = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    part_best = tl.full([BLOCK], float("-inf"), tl.float32)
    part_total = tl.zeros([BLOCK], tl.float32)
    part_result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    # One loop over the blocks of all parts, so that loading never pauses.
    steps: tl.constexpr = PART // KEYS
    first, end = lowest // PART + tl.program_id(2), tl.cdiv(length, PART)
    own = tl.cdiv(tl.maximum(end - first, 0), programs)
    last_part = first + (own - 1) * programs
    blocks = own * steps - tl.maximum((last_part + 1) * PART - length, 0) // KEYS
    dead = tl.maximum(lowest - first * PART, 0) // KEYS
    for block in range(dead, tl.where(own > 0, blocks, 0)):
        part = first + block // steps * programs
        at_key = part * PART + block % steps * KEYS
        part_best, part_total, part_result = see(
            query, part_best, part_total, part_result, at_key, lowest, length, positions,
            positions, tables, kv_head, k_of, k_tiles, k_scales_of, k_page, k_token, v_of, v_tiles,
            v_scales_of, v_page, v_token, scale, soft_cap, window,
            True, IS_TILED, HAS_SCALES, HAS_CAP, PAGE, HEAD_DIM, BLOCK_D, KEYS,
        )  # fmt: skip
        if (block % steps == steps - 1) | (block == blocks - 1):
            if IS_SPLIT:
                at_part = (row * heads + head) * parts + part
                tl.store(bests + at_part, part_best, mask=is_query)
                tl.store(totals + at_part, part_total, mask=is_query)
                places = results + at_part[:, None] * BLOCK_D + dims[None, :]
                tl.store(places, part_result, mask=is_own)
            else:
                best, total, result = merged(
                    best, total, result, part_best, part_total, part_result
                )
            part_best = tl.full([BLOCK], float("-inf"), tl.float32)
            part_total = tl.zeros([BLOCK], tl.float32)
            part_result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if not IS_SPLIT:
        result = result / tl.where(total > 0, total, 1.0)[:, None] * unit
        out_at = row * out_token + head[:, None] * out_head + dims[None, :]
        tl.store(out + out_at, result.to(query.dtype), mask=is_own)


@triton.jit
def merge(
    bests, totals, results, context_lengths, out, sinks, unit, heads, parts, out_token, out_head,
    window,
    HAS_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of `attend_rows` in order, for one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(context_lengths + row) + 1
    row = row.to(tl.int64)
    lowest = tl.maximum(0, -window)
    if window > 0:
        lowest = tl.maximum(0, length - window)
    one = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks + head + one).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    result = tl.zeros([1, BLOCK_D], tl.float32)
    end = (length + PART - 1) // PART
    for first in range(lowest // PART, end, AT_ONCE):
        for number in tl.static_range(AT_ONCE):  # a part after the last one changes nothing
            own = (row * heads + head) * parts + first + number + one
            is_part = first + number + one < end
            more_best = tl.load(bests + own, mask=is_part, other=float("-inf"))
            more_total = tl.load(totals + own, mask=is_part, other=0.0)
            at_part = results + own[:, None] * BLOCK_D + dims[None, :]
            values = tl.load(at_part, mask=is_part[:, None] & is_dim[None, :], other=0.0)
            best, total, result = merged(best, total, result, more_best, more_total, values)
    result = result / tl.where(total > 0, total, 1.0)[:, None] * unit
    out_at = row * out_token + head * out_head + one[:, None] + dims[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=is_dim[None, :])
