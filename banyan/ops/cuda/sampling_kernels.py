"""Triton kernel that draws tokens. Imported on first use, because Triton may be missing.

It must be compiled without fused multiply-add: every rounding is part of the definition in
`ops/sampling.py`.
"""

import triton
import triton.language as tl

_ONE = tl.constexpr(4503599627370496.0)
"""2**52: adding it rounds a double below 2**51 to the nearest whole number, ties to even."""
_HALF = tl.constexpr(12582912.0)
"""1.5 · 2**23: the same for floats of either sign."""
_ENDLESS = tl.constexpr(0x7F800000)
"""The bits of infinity."""
_NEVER = tl.constexpr((1 << 63) - 1)
"""Larger than any weight or number of tokens."""


@triton.jit
def weight_of(below, factor):
    """`sampling.weights` in units of 2**-44; factor: log2(e) / temperature, negative."""
    x = tl.maximum(below * factor, -58.0)
    n = (x + _HALF) - _HALF
    f = x - n
    p = f * 1.3264727302595286e-3 + 9.671512728701554e-3
    p = p * f + 5.550733743811287e-2
    p = p * f + 2.4022242084016499e-1
    p = p * f + 6.93146977598356e-1
    p = p * f + 1.0
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    wide = bits.to(tl.float32, bitcast=True).to(tl.float64) * 17592186044416.0
    return ((wide + _ONE) - _ONE).to(tl.int64)


@triton.jit
def mixed(z):
    """`sampling._mix`; z: uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def last_of(
    logits, best, factor, temperature, top_k, top_p, found, vocab, TILE: tl.constexpr
):  # fmt: skip
    """The bits of the largest allowed distance below the best token, by top_k and top_p: the
    smallest distance that includes top_k tokens or a share top_p of the weight.

    Eight distances are tried on all tokens at once. The tokens between the last distance that is
    too small and the first that suffices are written to `found`, where the interval is halved until
    one token is left. top_k: more than there are tokens = off.
    """
    QUARTER: tl.constexpr = TILE // 4
    at = tl.arange(0, QUARTER)  # eight numbers each
    each = tl.arange(0, 8)
    tried = temperature.to(tl.float32) * tl.exp2(each.to(tl.float32) - 2.0)
    tried = tl.where(each == 7, _ENDLESS, tried.to(tl.int32, bitcast=True))
    weights = tl.zeros([QUARTER, 8], tl.int64)
    counts = tl.zeros([QUARTER, 8], tl.int32)
    for begin in range(0, vocab, QUARTER):
        inside = begin + at < vocab
        below = best - tl.load(logits + begin + at, mask=inside, other=float("-inf"))
        bits = below.to(tl.int32, bitcast=True)
        is_near = inside[:, None] & (bits[:, None] <= tried[None, :])
        weights += tl.where(is_near, weight_of(below, factor)[:, None], 0)
        counts += is_near.to(tl.int32)
    weight, count = tl.sum(weights, 0), tl.sum(counts, 0)
    enough = tl.maximum((top_p * tl.max(weight, 0).to(tl.float64)).to(tl.int64), 1)
    enough = tl.where(top_p < 1.0, enough, _NEVER)
    is_enough = (count >= top_k) | (weight >= enough)
    high = tl.min(tl.where(is_enough, tried, _ENDLESS), 0)
    low = tl.max(tl.where(is_enough, -1, tried), 0)
    less_weight = tl.max(tl.where(is_enough, 0, weight), 0)
    less_count = tl.max(tl.where(is_enough, 0, count), 0)
    at = tl.arange(0, TILE)
    if low + 1 < high:
        size = 0
        for begin in range(0, vocab, TILE):
            inside = begin + at < vocab
            below = best - tl.load(logits + begin + at, mask=inside, other=float("-inf"))
            bits = below.to(tl.int32, bitcast=True)
            is_between = inside & (bits > low) & (bits <= high)
            place = size + tl.cumsum(is_between.to(tl.int32), 0) - 1
            tl.store(found + place, below, mask=is_between)
            size += tl.sum(is_between.to(tl.int32), 0)
        tl.debug_barrier()  # what others have written is read from here on
        while low + 1 < high:
            middle = low + (high - low) // 2
            near_weight = tl.zeros([TILE], tl.int64)
            near_count = tl.zeros([TILE], tl.int32)
            for begin in range(0, size, TILE):
                inside = begin + at < size
                below = tl.load(found + begin + at, mask=inside, other=0.0)
                is_near = inside & (below.to(tl.int32, bitcast=True) <= middle)
                near_weight += tl.where(is_near, weight_of(below, factor), 0)
                near_count += is_near.to(tl.int32)
            is_it = less_count + tl.sum(near_count, 0) >= top_k
            is_it = is_it | (less_weight + tl.sum(near_weight, 0) >= enough)
            high = tl.where(is_it, middle, high)
            low = tl.where(is_it, low, middle)
    return high


@triton.jit
def kept(logits, begin, best, factor, last, least, vocab, TILE: tl.constexpr):
    """The weights of TILE tokens; 0 = filtered out."""
    at = begin + tl.arange(0, TILE)
    below = best - tl.load(logits + at, mask=at < vocab, other=float("-inf"))
    weight = weight_of(below, factor)
    is_kept = (at < vocab) & (below.to(tl.int32, bitcast=True) <= last) & (weight >= least)
    return tl.where(is_kept, weight, 0)


@triton.jit
def draw(
    logits, bests, words, flags, slots, positions, tokens, found, vocab, logits_row, found_row,
    WORDS: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, SEED: tl.constexpr, GREEDY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row: the token at its quantile, or the best one if the row is greedy.

    words, flags: the parameters of all slots as int64 and as bytes, WORDS int64 each; TEMPERATURE
    … SEED: indices of words, GREEDY: index of a byte.
    """
    row = tl.program_id(0)
    slot, best = tl.load(slots + row), tl.load(bests + row)
    mine = words + slot * WORDS
    if (
        (tl.load(flags + slot * WORDS * 8 + GREEDY) != 0)
        | (tl.abs(best) == float("inf"))
        | (best != best)
    ):
        return
    logits += row.to(tl.int64) * logits_row
    temperature = tl.load(mine + TEMPERATURE).to(tl.float64, bitcast=True)
    factor = (-1.4426950408889634 / temperature).to(tl.float32)
    top_k = tl.load(mine + TOP_K)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, _NEVER)
    top_p = tl.load(mine + TOP_P).to(tl.float64, bitcast=True)
    min_p = tl.load(mine + MIN_P).to(tl.float64, bitcast=True)
    least = (min_p * 17592186044416.0).to(tl.int64)
    last = 0x7F800000
    if (top_k < _NEVER) | (top_p < 1.0):
        found += row.to(tl.int64) * found_row
        last = last_of(logits, best, factor, temperature, top_k, top_p, found, vocab, TILE)
    total = tl.zeros([TILE], tl.int64)
    for begin in range(0, vocab, TILE):
        total += kept(logits, begin, best, factor, last, least, vocab, TILE)
    seed = tl.load(mine + SEED).to(tl.uint64)
    golden = 0x9E3779B97F4A7C15
    position = tl.load(positions + row).to(tl.uint64)
    at = mixed((mixed(seed + golden) ^ position) + golden)
    wanted = tl.umulhi(tl.sum(total, 0).to(tl.uint64), at).to(tl.int64)
    here, before, sum_before = 0, wanted * 0, wanted * 0
    for begin in range(0, vocab, TILE):
        more = tl.sum(kept(logits, begin, best, factor, last, least, vocab, TILE), 0)
        is_here = (sum_before <= wanted) & (sum_before + more > wanted)
        here = tl.where(is_here, begin, here)
        before = tl.where(is_here, sum_before, before)
        sum_before += more
    mass = before + tl.cumsum(kept(logits, here, best, factor, last, least, vocab, TILE), 0)
    tl.store(tokens + row, (here + tl.sum((mass <= wanted).to(tl.int32), 0)).to(tl.int64))
