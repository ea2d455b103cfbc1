"""Triton kernels of latent attention (MLA). Imported on first use, because Triton may be missing.

A block of queries is some tokens of one row times some heads; all heads read the same latents and
rotated keys. The launch sets how many programs share the keys of a block, in whole steps of KEYS;
`join_parts` combines their results. No grid depends on lengths.
"""

import triton
import triton.language as tl

from banyan.ops.cuda.attention_kernels import row_of
from banyan.ops.cuda.branch_kernels import length_of, owner_of, places_of


@triton.jit
def write_latents(
    latent, key, latent_pages, key_pages, locations, latent_token, key_token,
    latent_page, latent_inside, key_page, key_inside, rank, rope_dim,
    PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write the latent and the rotated key of one token to their pages."""
    token = tl.program_id(0).to(tl.int64)
    location = tl.load(locations + token)
    page, inside = location // PAGE, location % PAGE
    at = tl.arange(0, BLOCK_R)
    values = tl.load(latent + token * latent_token + at, mask=at < rank)
    place = latent_pages + page * latent_page + inside * latent_inside
    tl.store(place + at, values.to(latent_pages.dtype.element_ty), mask=at < rank)
    at = tl.arange(0, BLOCK_T)
    values = tl.load(key + token * key_token + at, mask=at < rope_dim)
    place = key_pages + page * key_page + inside * key_inside
    tl.store(place + at, values.to(key_pages.dtype.element_ty), mask=at < rope_dim)


@triton.jit
def _share_of(lowest, length, parts, LEAST: tl.constexpr):
    """Keys per part, a multiple of LEAST."""
    steps = tl.cdiv(length - lowest // LEAST * LEAST, LEAST)
    return tl.cdiv(steps, parts) * LEAST


@triton.jit
def _lines(base, at, is_line, dims, is_dim):
    """[lines, dims] at some positions; zeros at masked ones."""
    return tl.load(
        base + at[:, None] + dims[None, :], mask=is_line[:, None] & is_dim[None, :], other=0.0
    )


@triton.jit
def _is_chosen(chosen, own, is_query, key, is_key, chosen_token):
    """Bit key % 32 of word key // 32 of each query's token. [queries, keys]"""
    words = tl.load(
        chosen + own[:, None] * chosen_token + (key // 32)[None, :],
        mask=is_query[:, None] & is_key[None, :],
        other=0,
    )
    return ((words >> (key % 32)[None, :]) & 1) != 0


@triton.jit
def _stored_at(tables, path, key, is_key, HAS_PATHS: tl.constexpr, PAGE: tl.constexpr):
    """Page and place inside it of some positions."""
    place = key
    if HAS_PATHS:
        place = places_of(path, key, is_key)
    return tl.load(tables + place // PAGE, mask=is_key, other=0).to(tl.int64), place % PAGE


@triton.jit
def _see(best, total, result, logit, latent, PRECISION: tl.constexpr):
    """The softmax state after more keys."""
    larger = tl.maximum(best, tl.max(logit, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weight, kept = tl.exp(logit - base[:, None]), tl.exp(best - base)
    total = total * kept + tl.sum(weight, 1)
    result = result * kept[:, None]
    result = tl.dot(weight.to(latent.dtype), latent, result, input_precision=PRECISION)
    return larger, total, result


@triton.jit
def attend_latents(
    q, q_turned, latent_pages, key_pages, page_tables, row_starts, context_lengths, chosen,
    out, sums, scale, first_position, rows, heads, rank, rope_dim, parts,
    q_token, q_head, turned_token, turned_head, latent_page, latent_inside, key_page, key_inside,
    table_row, chosen_token, out_token, out_head, out_part, sums_part, paths, path_token,
    HAS_PATHS: tl.constexpr, HAS_CHOSEN: tl.constexpr, IS_DIVIDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys of a block of queries. out: [parts, tokens, heads, rank]; sums: [parts,
    tokens, heads] fp32, the logarithm of the part's sum of weights if there are several parts."""
    block, head_block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_of(row_starts, rows, block, PER_BLOCK)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    first = (block - (start // PER_BLOCK + row)) * PER_BLOCK
    if first >= count:
        return
    context = tl.load(context_lengths + row)
    length = context + tl.minimum(first + PER_BLOCK, count)
    path = paths + (start + first).to(tl.int64) * path_token
    if HAS_PATHS:
        length = length_of(path, length)
    begin, end = first_position // LEAST * LEAST, length
    if IS_DIVIDED:
        share = _share_of(first_position, length, parts, LEAST)
        begin += part * share
        end = tl.minimum(begin + share, length)
        if begin >= length:
            return
    at = tl.arange(0, BLOCK)
    token, head = first + at // GROUP, head_block * GROUP + at % GROUP
    is_query = (at < PER_BLOCK * GROUP) & (token < count) & (head < heads)
    position = context + token
    if HAS_PATHS:
        position = length - 1 + tl.zeros([BLOCK], tl.int32)
    own = (start + token).to(tl.int64)
    dims, turns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    is_dim, is_turn = dims < rank, turns < rope_dim
    query = _lines(q, own * q_token + head * q_head, is_query, dims, is_dim)
    turned_at = own * turned_token + head * turned_head
    turned = _lines(q_turned, turned_at, is_query, turns, is_turn)
    tables = page_tables + row.to(tl.int64) * table_row
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    result = tl.zeros([BLOCK, BLOCK_R], tl.float32)
    for here in range(begin, end, KEYS):
        key = here + tl.arange(0, KEYS)
        is_key = (key >= first_position) & (key < end)
        page, inside = _stored_at(tables, path, key, is_key, HAS_PATHS, PAGE)
        k = _lines(key_pages, page * key_page + inside * key_inside, is_key, turns, is_turn)
        latent_at = page * latent_page + inside * latent_inside
        latent = _lines(latent_pages, latent_at, is_key, dims, is_dim).to(query.dtype)
        logit = tl.dot(turned, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
        logit = tl.dot(query, tl.trans(latent), logit, input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_CHOSEN:
            is_seen &= _is_chosen(chosen, own, is_query, key, is_key, chosen_token)
        logit = tl.where(is_seen, logit, float("-inf"))
        best, total, result = _see(best, total, result, logit, latent, PRECISION)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    place = out + part.to(tl.int64) * out_part + own[:, None] * out_token + head[:, None] * out_head
    is_out = is_query[:, None] & is_dim[None, :]
    tl.store(place + dims[None, :], result.to(out.dtype.element_ty), mask=is_out)
    if IS_DIVIDED:
        place = sums + part.to(tl.int64) * sums_part + own * heads + head
        tl.store(place, best + tl.log(total), mask=is_query)


@triton.jit
def join_parts(
    found, sums, out, row_starts, context_lengths, first_position, rows, heads, rank, parts,
    found_token, found_head, found_part, sums_part, out_token, out_head, paths, path_token,
    HAS_PATHS: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, PER_BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """One token and head: the average of the parts' results, weighted by their sums."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = owner_of(row_starts, rows, token)
    start = tl.load(row_starts + row)
    count = tl.load(row_starts + row + 1) - start
    first = (token - start) // PER_BLOCK * PER_BLOCK
    length = tl.load(context_lengths + row) + tl.minimum(first + PER_BLOCK, count)
    if HAS_PATHS:
        length = length_of(paths + token.to(tl.int64) * path_token, length)
    share = _share_of(first_position, length, parts, LEAST)
    used = tl.cdiv(length - first_position // LEAST * LEAST, share)
    at = tl.arange(0, PARTS)
    own = token.to(tl.int64)
    sizes = tl.load(
        sums + at.to(tl.int64) * sums_part + own * heads + head, mask=at < used, other=float("-inf")
    )
    most = tl.max(sizes, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp(sizes - base), 0)
    dims = tl.arange(0, BLOCK_R)
    result = tl.zeros([BLOCK_R], tl.float32)
    line = found + own * found_token + head * found_head + dims
    size = sums + own * heads + head
    for _ in range(0, used):
        share_of_it = tl.exp(tl.load(size) - base)
        result += tl.load(line, mask=dims < rank, other=0.0) * share_of_it
        line += found_part
        size += sums_part
    result = result / tl.where(total > 0, total, 1.0)
    place = out + own * out_token + head * out_head + dims
    tl.store(place, result.to(out.dtype.element_ty), mask=dims < rank)


@triton.jit
def score_positions(
    q, q_turned, weights, key_pages, turned_pages, page_tables, row_starts, context_lengths, scores,
    first_token, first_position, rows, heads, width, rope_dim, top, parts,
    q_token, q_head, turned_token, turned_head, weights_token, key_page, key_inside, turned_page,
    turned_inside, table_row, scores_token, paths, path_token,
    HAS_PATHS: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The indexer's score of every position up to a token's own: each `parts`-th block of keys.
    Nothing is stored for tokens that read all of them. scores: [tokens of the launch, any] fp32."""
    token, part = first_token + tl.program_id(0), tl.program_id(1)
    row = owner_of(row_starts, rows, token)
    length = tl.load(context_lengths + row) + token - tl.load(row_starts + row) + 1
    path = paths + token.to(tl.int64) * path_token
    if HAS_PATHS:
        length = length_of(path, length)
    if length - first_position <= top:
        return
    own, head = token.to(tl.int64), tl.arange(0, HEADS)
    dims, turns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    is_head, is_dim, is_turn = head < heads, dims < width, turns < rope_dim
    query = _lines(q, own * q_token + head * q_head, is_head, dims, is_dim)
    turned_at = own * turned_token + head * turned_head
    turned = _lines(q_turned, turned_at, is_head, turns, is_turn)
    weight = tl.load(weights + own * weights_token + head, mask=is_head, other=0.0).to(tl.float32)
    tables = page_tables + row.to(tl.int64) * table_row
    place = scores + tl.program_id(0).to(tl.int64) * scores_token
    for here in range(part * KEYS, length, parts * KEYS):
        key = here + tl.arange(0, KEYS)
        is_key = (key >= first_position) & (key < length)
        page, inside = _stored_at(tables, path, key, is_key, HAS_PATHS, PAGE)
        k = _lines(key_pages, page * key_page + inside * key_inside, is_key, dims, is_dim)
        turned_key_at = page * turned_page + inside * turned_inside
        k_turned = _lines(turned_pages, turned_key_at, is_key, turns, is_turn)
        score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision=PRECISION)
        score = tl.dot(turned, tl.trans(k_turned.to(query.dtype)), score, input_precision=PRECISION)
        total = tl.sum(tl.maximum(score, 0.0) * weight[:, None], 0)
        total = tl.where(total == 0, 0.0, total)  # zero has one sign
        tl.store(place + key, tl.where(is_key, total, float("-inf")), mask=key < length)


@triton.jit
def _ranks_of(scores, key, length):
    """Integers in the order of the scores; the lowest one after the last score."""
    bits = tl.load(scores + key, mask=key < length, other=float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose_best(
    scores, chosen, row_starts, context_lengths, first_token, first_position, rows, top,
    scores_token, chosen_token, paths, path_token, HAS_PATHS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The bits of the `top` best positions of a token, lower positions first among equals. The
    lowest rank that is chosen is found by halving."""
    token = first_token + tl.program_id(0)
    row = owner_of(row_starts, rows, token)
    length = tl.load(context_lengths + row) + token - tl.load(row_starts + row) + 1
    if HAS_PATHS:
        length = length_of(paths + token.to(tl.int64) * path_token, length)
    own = scores + tl.program_id(0).to(tl.int64) * scores_token
    words = chosen + token.to(tl.int64) * chosen_token
    at = tl.arange(0, TILE)
    is_whole = length - first_position <= top
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483648, tl.int64)
    above: tl.int32 = 0  # positions whose rank is `high` or more
    if not is_whole:
        while high - low > 1:
            middle = low + (high - low) // 2
            count: tl.int32 = 0
            for begin in range(0, length, TILE):
                rank = _ranks_of(own, begin + at, length)
                count += tl.sum((rank >= middle).to(tl.int32), 0)
            is_enough = count >= top
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
            above = tl.where(is_enough, above, count)
    spare = top - above
    one: tl.constexpr = TILE // 32
    worth = tl.full([32], 1, tl.int32) << tl.arange(0, 32)
    for begin in range(0, length, TILE):
        key = begin + at
        is_best = (key >= first_position) & (key < length)
        if not is_whole:
            rank = _ranks_of(own, key, length)
            is_equal = (rank == low) & is_best
            order = tl.cumsum(is_equal.to(tl.int32), 0)
            is_best = is_best & ((rank > low) | (is_equal & (order <= spare)))
            spare -= tl.sum(is_equal.to(tl.int32), 0)
        bits = tl.reshape(is_best.to(tl.int32), [one, 32]) * worth[None, :]
        word = begin // 32 + tl.arange(0, one)
        tl.store(words + word, tl.sum(bits, 1), mask=word < tl.cdiv(length, 32))
