"""Vocabulary: what a grammar must know of the tokens: the bytes of each, and what they are for."""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

Encode = Callable[[str], list[int]]
"""The model's own way to write a text in tokens; a special token's text becomes that token."""

_WORD_BITS = 32


class Vocabulary(msgspec.Struct, frozen=True):
    """Travels to the compiler process as it is."""

    tokens: list[bytes]
    """Bytes by id, one entry for each logit of the model; b"" for ids that are no text."""
    end_ids: tuple[int, ...]
    """Tokens that end an output."""
    special_ids: tuple[int, ...] = ()
    """Tokens that mark turns and tools; allowed only where a constraint names their text."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        return -(-self.size // _WORD_BITS)

    def bits(self, ids: Iterable[int]) -> np.ndarray:
        """A mask in which just `ids` are allowed: int32 [words]."""
        allowed = np.zeros(self.num_words * _WORD_BITS, dtype=bool)
        allowed[[id for id in ids if id < self.size]] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)


def longest_first(vocabulary: Vocabulary) -> Encode:
    """Writes text in the longest tokens that fit, for where the model's tokenizer is not at hand.

    Bytes that no token begins with are left out.
    """
    ids = {token: id for id, token in reversed(list(enumerate(vocabulary.tokens))) if token}
    longest = max(map(len, ids), default=0)

    def encode(text: str) -> list[int]:
        rest = text.encode()
        found: list[int] = []
        while rest:
            size = next((n for n in range(longest, 0, -1) if rest[:n] in ids), 1)
            if rest[:size] in ids:
                found.append(ids[rest[:size]])
            rest = rest[size:]
        return found

    return encode


def vocabulary_of(
    pieces: Callable[[int], bytes],
    num_pieces: int,
    size: int,
    end_ids: Iterable[int],
    special_ids: Iterable[int],
) -> Vocabulary:
    """The vocabulary of a model with `size` logits and a tokenizer of `num_pieces` tokens."""
    tokens = [pieces(id) for id in range(min(num_pieces, size))]
    tokens += [b""] * (size - len(tokens))
    ends = tuple(sorted({id for id in end_ids if id < size}))
    special = {id for id in special_ids if id < size}
    return Vocabulary(tokens, ends, tuple(sorted(special.difference(ends))))
