"""Triton kernels of LoRA adapters. Imported on first use, because Triton may be missing.

A program has a block of consecutive tokens and visits each of their adapters once; tokens of other
adapters, or of none, are masked when it stores. So nothing is sorted, the grids depend only on the
number of tokens, and a token's sum has the same order whatever tokens are next to it.
"""

import triton
import triton.language as tl


@triton.jit
def _numbers_of(others, row, is_row, capacity, CAPACITY: tl.constexpr):
    """The adapter of each token, from 0; −1 = none. others: [tokens, capacity], True for the
    adapters that are not the token's."""
    at = tl.arange(0, CAPACITY)
    is_there = is_row[:, None] & (at < capacity)[None, :]
    other = tl.load(others + row[:, None] * capacity + at[None, :], mask=is_there, other=1)
    return tl.sum(tl.where(other == 0, at[None, :] + 1, 0), 1) - 1


@triton.jit
def _part_of(tile, first_size, second_size, third_size, fourth_size, COLUMNS: tl.constexpr):
    """(part of a program's outputs, the part's first output, its number of outputs, the program's
    index within the part)."""
    part, first, outputs = 0, 0, first_size
    for at in tl.static_range(1, 4):
        size = second_size if at == 1 else (third_size if at == 2 else fourth_size)
        tiles = tl.cdiv(outputs, COLUMNS)
        is_later = tile >= tiles
        tile = tl.where(is_later, tile - tiles, tile)
        first = tl.where(is_later, first + outputs, first)
        outputs = tl.where(is_later, size, outputs)
        part = tl.where(is_later, at, part)
    return part, first, outputs, tile


@triton.jit(do_not_specialize=["tokens", "capacity", "rank", "parts"])
def go_down(
    x, down, others, inner, tokens, inputs, x_row, capacity, rank, parts,
    CAPACITY: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, CUT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The A product: some ranks of one part, summed over CUT inputs. x: [tokens, inputs]; down:
    [parts, capacity, rank, inputs]; inner: [cuts, tokens, parts · rank] fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunks = tl.cdiv(rank, RANKS)
    part = tl.program_id(1) // chunks
    which = (tl.program_id(1) % chunks) * RANKS + tl.arange(0, RANKS)
    cut = tl.program_id(2)
    is_row, is_rank = row < tokens, which < rank
    numbers = _numbers_of(others, row, is_row, capacity, CAPACITY)
    steps = tl.arange(0, STEP)
    source = x + row.to(tl.int64)[:, None] * x_row + steps[None, :]
    place = inner + (cut.to(tl.int64) * tokens + row)[:, None] * (parts * rank) + part * rank
    wide = tl.full([], 1, tl.int64)
    lowest, highest = tl.min(tl.where(numbers < 0, capacity, numbers), 0), tl.max(numbers, 0)
    for number in range(lowest, highest + 1):
        is_mine = numbers == number
        if tl.sum(is_mine.to(tl.int32), 0) > 0:
            own = wide * (part * capacity + number) * rank
            lines = down + (own + which)[None, :] * inputs + steps[:, None]
            total = tl.zeros([ROWS, RANKS], tl.float32)
            for begin in range(cut * CUT, tl.minimum(cut * CUT + CUT, inputs), STEP):
                is_in = begin + steps < inputs
                values = tl.load(source + begin, mask=is_mine[:, None] & is_in[None, :], other=0.0)
                factors = tl.load(lines + begin, mask=is_in[:, None] & is_rank[None, :], other=0.0)
                values = values.to(down.dtype.element_ty)
                total = tl.dot(values, factors, total, input_precision="ieee")
            tl.store(place + which[None, :], total, mask=is_mine[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["tokens", "capacity", "rank", "parts", "cuts"])
def go_up(
    inner, up, others, out, tokens, out_row, capacity, rank, parts, cuts,
    first_size, second_size, third_size, fourth_size,
    CAPACITY: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The B product: some outputs of one part. inner: from `go_down`; AT_ONCE cuts are loaded
    together; up: [capacity, rank, outputs] of each part, one after another; the sizes: outputs of
    each part; out: [tokens, outputs], added to."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, first, outputs, tile = _part_of(
        tl.program_id(1), first_size, second_size, third_size, fourth_size, COLUMNS
    )
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < tokens, column < outputs
    numbers = _numbers_of(others, row, is_row, capacity, CAPACITY)
    wide = tl.full([], 1, tl.int64)
    made_at = inner + row.to(tl.int64)[:, None] * (parts * rank) + part * rank
    ahead = wide * tokens * (parts * rank)
    own = up + wide * capacity * rank * first
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    lowest, highest = tl.min(tl.where(numbers < 0, capacity, numbers), 0), tl.max(numbers, 0)
    for number in range(lowest, highest + 1):
        is_mine = numbers == number
        if tl.sum(is_mine.to(tl.int32), 0) > 0:
            for begin in range(0, rank, RANKS):
                which = begin + tl.arange(0, RANKS)
                is_rank = which < rank
                is_made = is_mine[:, None] & is_rank[None, :]
                made = tl.zeros([ROWS, RANKS], tl.float32)
                at = made_at + which[None, :]
                for cut in range(0, cuts, AT_ONCE):
                    for more in tl.static_range(AT_ONCE):
                        is_there = is_made & (cut + more < cuts)
                        made += tl.load(at + (cut + more) * ahead, mask=is_there, other=0.0)
                lines = own + (wide * number * rank + which)[:, None] * outputs + column[None, :]
                is_factor = is_rank[:, None] & is_column[None, :]
                factors = tl.load(lines, mask=is_factor, other=0.0)
                made = made.to(up.dtype.element_ty)
                total = tl.dot(made, factors, total, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * out_row + (first + column)[None, :]
    is_changed = (numbers >= 0)[:, None] & is_column[None, :]
    before = tl.load(place, mask=is_changed, other=0.0).to(tl.float32)
    tl.store(place, (before + total).to(out.dtype.element_ty), mask=is_changed)
