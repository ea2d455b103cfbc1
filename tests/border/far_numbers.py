"""The numbers of a tiny model for devices that attend in half precision over large pages, and the
model itself in plain integers; beside `page_numbers.py`, whose sums would not be exact there.

Every layer adds, to a position's own code, the codes of four positions that it sees: two that its
position names, the lowest, and that of the largest (token, position); all modulo BASE.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.border.page_numbers import BASE, HEAD, LOGIT_UNIT, VOCAB, WIDTH, lowest, thermometer

LAYERS = 3
LONGEST = 384
"""Positions that the tables have."""
BLOCK = 128
"""A position is given as position // BLOCK and what is left: both are exact in half precision."""
STEP = 2048
"""Between the ranks of two tokens: more than there are positions."""

_random = np.random.default_rng(21)
TOKEN_CODES = _random.integers(0, BASE, (VOCAB, WIDTH))
POSITION_FACTORS = 2 * _random.integers(0, 8, (LONGEST, WIDTH)) + 1
SEEDS = _random.integers(0, 1 << 20, (2, LONGEST))
RANKS = _random.permutation(VOCAB)
FACTORS = (9, 3, 5, 7)
"""Of what is read from the first position named, the second, the lowest, the largest."""


def named(which: int, position: int, window: int) -> int:
    """The position that a layer reads for itself at `position`; which: 0 | 1."""
    first = lowest(position, window)
    return first + int(SEEDS[which, position]) % (position - first + 1)


@dataclass
class FarPrefix:
    """The codes of a sequence that only grows; see `page_numbers.Prefix`."""

    windows: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._codes = np.zeros((len(self.windows) + 1, LONGEST, WIDTH), np.int64)
        self._sizes = np.zeros(LONGEST, np.int64)

    def append(self, token: int) -> None:
        at = len(self.tokens)
        self.tokens.append(token)
        self._sizes[at] = STEP * int(RANKS[token]) + at
        code = (TOKEN_CODES[token] + BASE) * POSITION_FACTORS[at] % BASE
        for layer, window in enumerate(self.windows):
            codes = self._codes[layer]
            codes[at] = code
            first = lowest(at, window)
            largest = first + int(np.argmax(self._sizes[first : at + 1]))
            read = [named(0, at, window), named(1, at, window), first, largest]
            code = (code + FACTORS @ codes[read]) % BASE
        self._codes[-1, at] = code

    def hidden(self, position: int) -> np.ndarray:
        """[units] float32 of 1 and -1."""
        return thermometer(self._codes[-1, position])

    def logits(self, position: int) -> np.ndarray:
        """Of the token after `position`: [VOCAB] float32, exact."""
        return (HEAD @ self.hidden(position) * LOGIT_UNIT).astype(np.float32)
