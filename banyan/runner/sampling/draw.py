"""The choice of one token from one row of logits: a pure function of (logits, parameters, uniform).

Randomness is counter-based: the uniform number of a position is a hash of (seed, position), so a
token is the same alone, in a batch, and when it is computed again. The hash is SplitMix64's output
function (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

import math

import numpy as np

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_UNIFORM_BITS = 48
REACH = 50.0
"""Tokens this many nats below the best are left out: all of them together weigh less than half of
the smallest uniform for every vocabulary below 2**40, so no uniform could choose them."""

_BLOCK = 512

_SLACK = 1e-3
"""Nats by which the first cut is wider than the filters, which decide on exact weights."""
_ROUNDING = 1e-12
"""math.exp and numpy's differ in the last bit; equal logits must not part for that."""


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), in steps of 2**-48, that depends on both arguments alone."""
    state = _mix((seed & _MASK) + _GOLDEN)
    state = _mix((state ^ position) + _GOLDEN)
    return ((state >> (64 - _UNIFORM_BITS)) + 0.5) / (1 << _UNIFORM_BITS)


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


def draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, at: float
) -> int:
    """The token at the quantile `at` of the filtered distribution, in the order of token ids.

    logits: [vocab] float32 with a finite maximum; at: in (0, 1).
    """
    if top_p >= 1.0 and min_p <= 0.0 and not 0 < top_k < len(logits):
        return _draw_from_all(logits, temperature, at)
    ids, weights = support(logits, temperature, top_k, top_p, min_p)
    mass = np.cumsum(weights)
    return int(ids[np.searchsorted(mass, at * mass[-1], side="right")])


def _draw_from_all(logits: np.ndarray, temperature: float, at: float) -> int:
    """`draw` without a filter: finds the block first, so that most weights are only summed."""
    weights = np.exp((logits - np.max(logits)) / np.float32(temperature))
    mass = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    target = at * mass[-1]
    block = int(np.searchsorted(mass, target, side="right"))
    first = block * _BLOCK
    inside = np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    # A block's sum and its running sum may round apart: stay inside, and on a token with weight.
    within = np.searchsorted(inside, target - (mass[block - 1] if block else 0.0), side="right")
    return first + min(int(within), int(np.searchsorted(inside, inside[-1])))


def support(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be chosen, ascending, and their weights relative to the best token.

    The three filters act jointly on the distribution at `temperature`: the top_k largest; the
    smallest set of largest whose probability reaches top_p; those of at least min_p times the
    largest probability. Tokens of equal logit stay or go together, so nothing depends on how a
    sort orders ties.

    returns: ids int64 [n], weights float64 [n] (not normalised).
    """
    best = float(np.max(logits))
    floor, reach = min_p, -REACH
    if min_p > 0.0:
        reach = max(reach, math.log(min_p))
    if 0 < top_k < len(logits):
        last = float(np.partition(logits, -top_k)[-top_k])
        reach = max(reach, (last - best) / temperature)
        floor = max(floor, math.exp((last - best) / temperature))
    total = 0.0
    if top_p < 1.0:
        scaled = (logits - np.float32(best)) / np.float32(temperature)
        total = float(np.exp(scaled).sum(dtype=np.float64))
        # All tokens lighter than this sum up to less than 1 − top_p: the nucleus needs none.
        reach = max(reach, math.log((1.0 - top_p) * total / len(logits)))
    # Few tokens are left of most rows; only these are worth float64.
    ids = np.flatnonzero(logits >= np.float32(best + (reach - _SLACK) * temperature))
    weights = np.exp((logits[ids].astype(np.float64) - best) / temperature)
    if top_p < 1.0:
        floor = max(floor, _nucleus_floor(weights, top_p * total))
    keep = weights >= floor * (1.0 - _ROUNDING)
    return ids[keep], weights[keep]


def _nucleus_floor(weights: np.ndarray, wanted: float) -> float:
    """Smallest weight of the smallest set of largest weights that sum up to `wanted`."""
    falling = np.sort(weights)[::-1]
    inside = np.searchsorted(np.cumsum(falling), wanted, side="left")
    return float(falling[min(inside, len(falling) - 1)])


def best_token(logits: np.ndarray) -> int:
    """The most likely token, the lowest id among equals.

    Raises:
        ValueError: no token is allowed, or the logits are not numbers.
    """
    token = int(np.argmax(logits))
    check_best(float(logits[token]))
    return token


def check_best(value: float) -> None:
    """Raise ValueError, saying why, when the largest logit of a row cannot be chosen from."""
    if value == -math.inf:
        raise ValueError("every token is banned by the grammar, logit_bias and min_new_tokens")
    if not math.isfinite(value):
        raise ValueError("the model gave logits that are not finite numbers")
