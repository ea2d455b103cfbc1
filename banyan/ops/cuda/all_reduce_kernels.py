"""Triton kernels that add up the tensors of several ranks over memory that all of them map.

Each rank has a pad of flags and two buffers, which the others read and write by address. Sums are
fp32 in rank order, rounded once, so every kernel here gives every rank the same bits, for any size.

A call number decides the buffer and the flags' values, and the device counts the calls, so a
captured call can be replayed. Program p of a rank meets program p of the others only. A rank writes
a buffer again two calls later. Before that it has met the others in the call between, and a rank in
that call has finished the call before: nobody still reads the buffer.

Imported on first use, because Triton may be missing.
"""

import triton
import triton.language as tl


@triton.jit
def _meet(pads, rank, value, RANKS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Raise this program's flag on every rank to `value`, and wait until all have raised theirs.

    What the other ranks wrote before they came here can be read afterwards.
    """
    others = tl.arange(0, BLOCK_R)
    is_rank = others < RANKS
    first = tl.program_id(0) * RANKS
    theirs = tl.load(pads + others, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    mine = tl.load(pads + rank).to(tl.pointer_type(tl.int64)) + first + others
    values = tl.zeros([BLOCK_R], dtype=tl.int64) + value
    nothing = tl.zeros([BLOCK_R], dtype=tl.int64)
    tl.debug_barrier()  # all threads have written before one of them releases
    tl.atomic_xchg(theirs + first + rank, values, mask=is_rank, sem="release", scope="sys")
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(mine, nothing, mask=is_rank, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(is_rank & (seen < value), 1, 0), 0)
    tl.debug_barrier()  # no thread reads before one of them has acquired


@triton.jit
def _buffer(buffers, rank, like):
    """Buffers of a rank, which begin at a multiple of 16 bytes."""
    address = tl.load(buffers + rank).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(address, 16)


@triton.jit
def _read(buffers, rank, like, at, inside):
    """Numbers of a rank's buffers, past the nearest cache. at: offsets from the first buffer."""
    address = _buffer(buffers, rank, like) + at
    return tl.load(address, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_of(buffers, like, at, inside, RANKS: tl.constexpr):
    """The sum of the same places of all ranks."""
    total = _read(buffers, 0, like, at, inside).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += _read(buffers, rank, like, at, inside).to(tl.float32)
    return total.to(like.dtype.element_ty)


@triton.jit(do_not_specialize=["rank"])
def reduce_at_once(
    x,
    buffers,
    pads,
    calls,
    rank,
    count,
    capacity,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace x, [count], by the sum over the ranks: every rank adds all of it (one-shot).

    buffers, pads: [ranks] int64 addresses. calls: [programs] int64, calls so far.
    capacity: elements of one of a rank's two buffers.
    """
    program = tl.program_id(0)
    call = tl.load(calls + program)
    slot = (call % 2) * capacity
    own = _buffer(buffers, rank, x)
    step = tl.num_programs(0) * BLOCK
    for start in range(program * BLOCK, count, step):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(own + slot + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    _meet(pads, rank, 2 * call + 1, RANKS, BLOCK_R)
    for start in range(program * BLOCK, count, step):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(x + at, _sum_of(buffers, x, slot + at, inside, RANKS), mask=inside)
    tl.store(calls + program, call + 1)


@triton.jit(do_not_specialize=["rank"])
def reduce_in_parts(
    x,
    buffers,
    pads,
    calls,
    rank,
    count,
    capacity,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `reduce_at_once`, but each rank adds its own part and reads the others' sums (two-shot).

    Program by program, x is cut into stretches of RANKS blocks, one for each rank. A rank puts its
    sum where only it reads: into its own buffer, in place of its own addend.
    """
    program = tl.program_id(0)
    call = tl.load(calls + program)
    slot = (call % 2) * capacity
    own = _buffer(buffers, rank, x)
    stretch = RANKS * BLOCK
    step = tl.num_programs(0) * stretch
    for start in range(program * stretch, count, step):
        for part in tl.static_range(RANKS):
            at = start + part * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            tl.store(own + slot + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)
    _meet(pads, rank, 2 * call + 1, RANKS, BLOCK_R)
    for start in range(program * stretch, count, step):
        at = start + rank * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(own + slot + at, _sum_of(buffers, x, slot + at, inside, RANKS), mask=inside)
    _meet(pads, rank, 2 * call + 2, RANKS, BLOCK_R)
    for start in range(program * stretch, count, step):
        for part in tl.static_range(RANKS):
            at = start + part * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            tl.store(x + at, _read(buffers, part, x, slot + at, inside), mask=inside)
    tl.store(calls + program, call + 1)


@triton.jit
def add_parts(parts, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of RANKS parts, [RANKS, count], in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * count + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
