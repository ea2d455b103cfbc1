"""A small vocabulary, and a model that knows nothing: it draws any token that the mask allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from banyan.grammar.base import BACKENDS, Backend, Grammar, Program
from banyan.grammar.constrained import Constrained, TokenMasks
from banyan.grammar.vocabulary import Vocabulary, longest_first
from banyan.messages.requests import Constraint

END = 300
TOOL = 301
"""A special token, spelled "<tool>"."""
WORDS = (
    *(b"true", b"false", b"null", b'": ', b'", "', b'{"', b'"}', b"]}", b"}}", b" the", b" and"),
    *(b"  ", b"\n  ", b"\t", "é".encode(), "日".encode(), b"123", b"yes", b"no", b"ab", b"<tool"),
)
VOCABULARY = Vocabulary(
    [
        *(bytes([i]) for i in range(256)),
        *WORDS,
        *[b""] * (END - 256 - len(WORDS)),
        b"<end>",
        b"<tool>",
        b"",
    ],
    (END,),
    (TOOL,),
)
MASKS = TokenMasks(VOCABULARY)


def open_backend(name: str, whitespace: str | None = None) -> Backend:
    return BACKENDS.load(name)(VOCABULARY, longest_first(VOCABULARY), whitespace)


def compiled(backend: Backend, kind: str, text: str) -> Program:
    return backend.load(backend.compile(Constraint(kind, text)))


def started(backend: Backend, kind: str, text: str, after: Sequence[int] = ()) -> Constrained:
    constraint = Constraint(kind, text)
    return begin(compiled(backend, kind, text), constraint, after)


def begin(program: Program, constraint: Constraint, after: Sequence[int] = ()) -> Constrained:
    return Constrained(program.start(), MASKS, MASKS.text(constraint), after)


def allowed(grammar: Grammar) -> list[int]:
    return _ids(np.frombuffer(grammar.mask(), np.uint8)).tolist()


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(VOCABULARY.tokens[t] for t in tokens).decode("utf-8", "replace")


def write(grammar: Grammar, text: str) -> bool:
    """Whether `text` is taken byte by byte (a mask may want forced text in longer tokens)."""
    return all(grammar.accept(b) for b in text.encode())


@dataclass
class Played:
    tokens: list[int]
    text: str
    is_ended: bool = False
    is_stuck: bool = False


class Player:
    """A model that knows nothing, with a liking for what closes.

    Args:
        vocabulary: what it writes in.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._ends = frozenset(vocabulary.end_ids)
        closers = (i for i, t in enumerate(self._tokens) if t and set(t) <= set(b'"}] ,:'))
        self._closers = vocabulary.bits(closers).view(np.uint8)

    def play(self, grammar: Grammar, random: Random, most: int = 300) -> Played:
        """Draw tokens until one ends the output: as soon as an end is allowed, half the time."""
        tokens: list[int] = []
        while len(tokens) < most:
            mask = np.frombuffer(grammar.mask(), np.uint8)
            closers = mask & self._closers
            choices = _ids(closers if closers.any() and random.random() < 0.4 else mask)
            if not len(choices):
                return self._played(tokens, is_stuck=True)
            end = next((id for id in self._ends if mask[id // 8] >> (id % 8) & 1), -1)
            if end >= 0 and random.random() < 0.5:
                assert grammar.accept(end)
                return self._played(tokens, is_ended=True)
            token = int(random.choice(choices))
            assert grammar.accept(token), (token, self._text(tokens))
            if token in self._ends:
                return self._played(tokens, is_ended=True)
            tokens.append(token)
        return self._played(tokens)

    def _played(self, tokens: list[int], is_ended: bool = False, is_stuck: bool = False) -> Played:
        return Played(tokens, self._text(tokens), is_ended, is_stuck)

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(self._tokens[t] for t in tokens).decode("utf-8", "replace")


def _ids(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def play(grammar: Grammar, random: Random, most: int = 300) -> Played:
    """In the small vocabulary."""
    return Player(VOCABULARY).play(grammar, random, most)
