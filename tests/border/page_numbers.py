"""The numbers of a tiny model whose logits are a hash of the whole prefix, and the model itself in
plain integers: from a list of tokens to logits, without pages, rows or steps.

Every layer writes a code of WIDTH integers below BASE per position and reads, of the positions
that it sees: the sum of all codes; the code at one position that its own position names; the code
at the lowest position it sees; and the code of the largest (token, position). What it has read,
modulo BASE, is the code of the next layer. So the first layer's codes tell token and position, the
next layers' the whole prefix. `tests/border/page_model.py` computes the same with kernels.
"""

from dataclasses import dataclass, field

import numpy as np

VOCAB = 32
WIDTH = 4
BASE = 32
LAYERS = 3
LONGEST = 192
"""Positions that the tables have."""
POINTED, LOWEST, LARGEST = 3, 5, 7
"""Factors of what is read, beside the sum."""
STATEFUL = -1
"""In the place of a layer's window: it keeps a state of the sum, and of the code before."""
STEP = 128
"""Between the ranks of two tokens: more than there are positions of a request."""
UNITS = WIDTH * (BASE - 1)
"""Width of the hidden states."""
LOGIT_UNIT = 1 / 32

_random = np.random.default_rng(20)
TOKEN_CODES = _random.integers(0, BASE, (VOCAB, WIDTH))
POSITION_FACTORS = 2 * _random.integers(0, 8, (LONGEST, WIDTH)) + 1
POINTER_SEEDS = _random.integers(0, 1 << 20, LONGEST)
RANKS = _random.permutation(VOCAB)
HEAD = _random.integers(-6, 7, (VOCAB, UNITS))
"""[vocab, units] of the logits, in LOGIT_UNIT."""


def lowest(position: int, window: int) -> int:
    """The lowest position that a layer sees; window 0 = all."""
    return max(0, position - window + 1) if window else 0


def pointed(position: int, window: int) -> int:
    """The position that a layer reads for itself at `position`."""
    first = lowest(position, window)
    return first + int(POINTER_SEEDS[position]) % (position - first + 1)


def thermometer(code: np.ndarray) -> np.ndarray:
    """Each integer c as BASE - 1 numbers: c ones, then minus ones. [WIDTH · (BASE - 1)] float32"""
    steps = np.arange(1, BASE)
    return np.where(code[:, None] >= steps, 1, -1).astype(np.float32).reshape(-1)


@dataclass
class Prefix:
    """The codes of a sequence that only grows.

    Attributes:
        windows: by layer, positions that it sees; 0 = all; STATEFUL.
    """

    windows: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    codes: list[list[np.ndarray]] = field(default_factory=list)
    """By layer and position; the last entry is what the logits are made of."""

    def __post_init__(self) -> None:
        self.codes = [[] for _ in range(len(self.windows) + 1)]
        self._sums = [[np.zeros(WIDTH, np.int64)] for _ in self.windows]

    def append(self, token: int, given: np.ndarray | None = None) -> None:
        """given: the first code, in place of the token's."""
        position = len(self.tokens)
        self.tokens.append(token)
        code = (TOKEN_CODES[token] + BASE) * POSITION_FACTORS[position] % BASE
        code = code if given is None else given
        for layer, window in enumerate(self.windows):
            codes, sums = self.codes[layer], self._sums[layer]
            codes.append(code)
            sums.append(sums[-1] + code)
            if window == STATEFUL:
                before = codes[position - 1] if position else np.zeros(WIDTH, np.int64)
                code = (sums[-1] + POINTED * before) % BASE
                continue
            first = lowest(position, window)
            code = (
                sums[-1]
                - sums[first]
                + POINTED * codes[pointed(position, window)]
                + LOWEST * codes[first]
                + LARGEST * codes[self._largest(first)]
            ) % BASE
        self.codes[-1].append(code)

    def hidden(self, position: int) -> np.ndarray:
        """[units] float32 of 1 and -1."""
        return thermometer(self.codes[-1][position])

    def logits(self, position: int) -> np.ndarray:
        """Of the token after `position`: [VOCAB] float32, exact."""
        return (HEAD @ self.hidden(position) * LOGIT_UNIT).astype(np.float32)

    def _largest(self, first: int) -> int:
        seen = range(first, len(self.tokens))
        return max(seen, key=lambda at: STEP * int(RANKS[self.tokens[at]]) + at)
