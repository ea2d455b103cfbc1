"""Attention of prompts for Hopper in Gluon, Triton's language of warps and barriers. Imported on
first use, because Triton may be missing.

Three groups of warps: one loads keys and values page by page (TMA), two attend, each for half of
the queries. While a group turns logits into weights, the tensor cores multiply the weights of the
block before by its values (Shah et al., FlashAttention-3, arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def begin_of(block, span, KEYS: gl.constexpr):
    """First key of the n-th block that is read: those at both ends first, then the rest.

    span: begin, inner, outer, early; blocks from `begin` to `inner` and from `outer` on are such
    that some queries do not see all of their keys."""
    begin, inner, outer, early, edges = span
    at = inner + (block - edges) * KEYS
    if block < edges:
        at = outer + (block - early) * KEYS
    if block < early:
        at = begin + block * KEYS
    return at


@gluon.jit
def load_blocks(
    k_tiles, v_tiles, k_room, v_room, k_full, v_full, k_free, v_free, tables, span, blocks, column,
    PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    stage, phase = 0, 1
    for block in range(blocks):
        at = begin_of(block, span, KEYS)
        line = gl.load(tables + at // PAGE) * PAGE + at % PAGE
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_tiles, [line, column], k_full.index(stage), k_room.index(stage)
        )
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_tiles, [line, column], v_full.index(stage), v_room.index(stage)
        )
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def weights_of(
    logit, best, total, begin, edges_of, position, last, factor, window,
    IS_MASKED: gl.constexpr, LAYOUT: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Weights, and the softmax state with them; kept: the factor on what came before."""
    if IS_MASKED:
        lowest, length = edges_of
        key = begin + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        seen = ((key >= lowest) & (key < length))[None, :] & (key[None, :] <= last[:, None])
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        logit = gl.where(seen, logit, float("-inf"))
    larger = gl.maximum(best, gl.max(logit, 1) * factor)
    base = larger
    if IS_MASKED:
        base = gl.where(larger == float("-inf"), 0.0, larger)
    weight = gl.exp2(logit * factor - base[:, None])
    kept = gl.exp2(best - base)
    return weight, larger, total * kept + gl.sum(weight, 1), kept


@gluon.jit
def blank_values(v_room, v_full, stage, phase, begin, edges_of, KEYS: gl.constexpr):
    """Zeros for values that no query sees: a weight of zero does not undo what is no number."""
    lowest, length = edges_of
    if (begin < lowest) | (begin + KEYS > length):
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        key = begin + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        mbarrier.wait(v_full.index(stage), phase)
        values = v_room.index(stage).load(layout)
        values = gl.where(((key >= lowest) & (key < length))[:, None], values, 0.0)
        v_room.index(stage).store(values)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def step(
    state, query, k_room, v_room, k_full, v_full, k_free, v_free, block, span, edges_of, position,
    last, factor, window,
    IS_MASKED: gl.constexpr, LOGITS: gl.constexpr, RESULTS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Logits of a block, while the weights of the one before meet its values."""
    best, total, wide, result, stage, phase = state
    weight = gl.convert_layout(wide.to(query.dtype), gl.DotOperandLayout(0, RESULTS, 2))
    v_stage, v_phase = stage, phase
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    mbarrier.wait(k_full.index(stage), phase)
    zeros = gl.zeros([64, KEYS], gl.float32, LOGITS)
    logit = warpgroup_mma(
        query, k_room.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), v_phase)
    result = warpgroup_mma(weight, v_room.index(v_stage), result, is_async=True)
    logit = warpgroup_mma_wait(1, deps=(logit,))
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    begin = begin_of(block, span, KEYS)
    wide, best, total, kept = weights_of(
        logit, best, total, begin, edges_of, position, last, factor, window, IS_MASKED, LOGITS, KEYS
    )
    result = warpgroup_mma_wait(0, deps=(result,))
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(v_stage), count=1)
    if IS_MASKED:
        blank_values(v_room, v_full, stage, phase, begin, edges_of, KEYS)
    result = result * gl.convert_layout(kept, gl.SliceLayout(1, RESULTS))[:, None]
    return best, total, wide, result, stage, phase


@gluon.jit
def attend_half(
    q, out, sinks, k_room, v_room, k_full, v_full, k_free, v_free, strides, span, blocks, edges_of,
    start, first, count, context, kv_head, factor, unit, window,
    HALF: gl.constexpr, HAS_SINKS: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr,
    PER_BLOCK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps that attend for 64 queries."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_token, q_head, out_token, out_head = strides
    _, _, _, _, edges = span
    at = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    token, head = first + at // GROUP, kv_head * GROUP + at % GROUP
    is_query = (at < PER_BLOCK * GROUP) & (token < count)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    q_at = (start + token).to(gl.int64)[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    query = gl.load(q + q_at, mask=is_query[:, None], other=0.0)
    query = gl.convert_layout(query, gl.DotOperandLayout(0, LOGITS, 2))
    line = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    position = context + first + line // GROUP
    best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LOGITS))
    if HAS_SINKS:  # a logit without a value
        is_head = line < PER_BLOCK * GROUP
        found = gl.load(sinks + kv_head * GROUP + line % GROUP, mask=is_head, other=0.0)
        best = found.to(gl.float32) * 1.4426950408889634
        total = total + 1.0
    # The first block has no other before it.
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([64, KEYS], gl.float32, LOGITS)
    logit = warpgroup_mma(
        query, k_room.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    logit = warpgroup_mma_wait(0, deps=(logit,))
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    begin = begin_of(0, span, KEYS)
    wide, best, total, _ = weights_of(
        logit, best, total, begin, edges_of, position, position, factor, window, True, LOGITS, KEYS
    )
    blank_values(v_room, v_full, 0, 0, begin, edges_of, KEYS)
    state = best, total, wide, gl.zeros([64, HEAD_DIM], gl.float32, RESULTS), 0, 0
    for block in range(1, edges):
        state = step(
            state, query, k_room, v_room, k_full, v_full, k_free, v_free, block, span, edges_of,
            position, position, factor, window, True, LOGITS, RESULTS, KEYS, STAGES,
        )  # fmt: skip
    for block in range(gl.maximum(edges, 1), blocks):
        state = step(
            state, query, k_room, v_room, k_full, v_full, k_free, v_free, block, span, edges_of,
            position, position, factor, window, False, LOGITS, RESULTS, KEYS, STAGES,
        )  # fmt: skip
    best, total, wide, result, stage, phase = state
    weight = gl.convert_layout(wide.to(query.dtype), gl.DotOperandLayout(0, RESULTS, 2))
    mbarrier.wait(v_full.index(stage), phase)
    result = warpgroup_mma(weight, v_room.index(stage), result, is_async=True)
    result = warpgroup_mma_wait(0, deps=(result,))
    share = unit / gl.where(total > 0, total, 1.0)
    result = result * gl.convert_layout(share, gl.SliceLayout(1, RESULTS))[:, None]
    line = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULTS))
    token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
    is_query = (line < PER_BLOCK * GROUP) & (token < count)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULTS))
    out_at = (start + token).to(gl.int64)[:, None] * out_token
    out_at += head[:, None] * out_head + dims[None, :]
    gl.store(out + out_at, result.to(q.dtype.element_ty), mask=is_query[:, None])


@gluon.jit
def attend_on_hopper(
    q, k_tiles, v_tiles, page_tables, row_starts, context_lengths, out, sinks, scale, unit, rows,
    q_token, q_head, table_row, out_token, out_head, window,
    HAS_SINKS: gl.constexpr, PAGE: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr,
    PER_BLOCK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `attention_kernels.attend` with 128 queries a block; KEYS divides PAGE."""
    block, kv_head = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)
    low: gl.int32 = 0
    high: gl.int32 = rows
    while low < high:
        middle = (low + high) // 2
        if gl.load(row_starts + middle) // PER_BLOCK + middle <= block:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    start = gl.load(row_starts + row)
    count = gl.load(row_starts + row + 1) - start
    first = (block - (start // PER_BLOCK + row)) * PER_BLOCK
    if first < count:
        context = gl.load(context_lengths + row)
        tables = page_tables + row.to(gl.int64) * table_row
        length = context + gl.minimum(first + PER_BLOCK, count)
        lowest, all_from = gl.maximum(0, -window), gl.maximum(0, -window)
        if window > 0:
            lowest = gl.maximum(0, context + first - window + 1)
            all_from = gl.maximum(0, context + first + PER_BLOCK - window)
        begin = lowest // KEYS * KEYS
        inner = gl.minimum(gl.cdiv(all_from, KEYS), gl.cdiv(length, KEYS)) * KEYS
        outer = gl.maximum((context + first + 1) // KEYS * KEYS, inner)
        early = (inner - begin) // KEYS
        edges = early + gl.cdiv(length - outer, KEYS)
        blocks = edges + (outer - inner) // KEYS
        span = begin, inner, outer, early, edges
        edges_of = lowest, length
        kind: gl.constexpr = q.dtype.element_ty
        k_room = gl.allocate_shared_memory(kind, [STAGES, KEYS, HEAD_DIM], k_tiles.layout)
        v_room = gl.allocate_shared_memory(kind, [STAGES, KEYS, HEAD_DIM], v_tiles.layout)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_full.index(stage), count=1)
            mbarrier.init(v_full.index(stage), count=1)
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_free.index(stage), count=2)
        strides = q_token, q_head, out_token, out_head
        gl.warp_specialize(
            [
                (
                    attend_half,
                    (
                        q, out, sinks, k_room, v_room, k_full, v_full, k_free, v_free, strides,
                        span, blocks, edges_of, start, first, count, context, kv_head, scale, unit,
                        window, 0, HAS_SINKS, HEAD_DIM, GROUP, PER_BLOCK, KEYS, STAGES,
                    ),
                ),
                (
                    attend_half,
                    (
                        q, out, sinks, k_room, v_room, k_full, v_full, k_free, v_free, strides,
                        span, blocks, edges_of, start, first, count, context, kv_head, scale, unit,
                        window, 1, HAS_SINKS, HEAD_DIM, GROUP, PER_BLOCK, KEYS, STAGES,
                    ),
                ),
                (
                    load_blocks,
                    (
                        k_tiles, v_tiles, k_room, v_room, k_full, v_full, k_free, v_free, tables,
                        span, blocks, kv_head * HEAD_DIM, PAGE, KEYS, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
