"""A small vocabulary, and a model that knows nothing: it draws any token that the mask allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from banyan.grammar.base import BACKENDS, Backend, Grammar, Program
from banyan.grammar.constrained import Constrained, TokenMasks
from banyan.grammar.vocabulary import Vocabulary, longest_first
from banyan.messages.constraint import Constraint

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
_CLOSERS = [i for i, t in enumerate(VOCABULARY.tokens) if t and set(t) <= set(b'"}] ,:')]


def open_backend(name: str, compact: bool = False) -> Backend:
    return BACKENDS.load(name)(VOCABULARY, longest_first(VOCABULARY), compact)


def compiled(backend: Backend, kind: str, text: str) -> Program:
    return backend.load(backend.compile(Constraint(kind, text)))


def started(backend: Backend, kind: str, text: str, after: Sequence[int] = ()) -> Constrained:
    constraint = Constraint(kind, text)
    return begin(compiled(backend, kind, text), constraint, after)


def begin(program: Program, constraint: Constraint, after: Sequence[int] = ()) -> Constrained:
    return Constrained(program.start(), MASKS, MASKS.text(constraint), after)


def allowed(grammar: Grammar) -> list[int]:
    bits = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(VOCABULARY.tokens[t] for t in tokens).decode("utf-8", "replace")


def write(grammar: Grammar, text: str) -> bool:
    """Whether `text` is taken byte by byte (a mask may want forced text in longer tokens)."""
    return all(grammar.accept(b) for b in text.encode())


@dataclass
class Played:
    tokens: list[int]
    is_ended: bool
    is_stuck: bool = False

    @property
    def text(self) -> str:
        return text_of(self.tokens)


def play(grammar: Grammar, random: Random, most: int = 300) -> Played:
    """Draw tokens until an end is allowed, with a liking for what closes."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(grammar)
        if not choices:
            return Played(tokens, False, is_stuck=True)
        if END in choices and random.random() < 0.5:
            assert grammar.accept(END)
            return Played(tokens, True)
        closers = [t for t in _CLOSERS if t in choices] if random.random() < 0.4 else []
        token = random.choice(closers or [t for t in choices if t != END] or [END])
        assert grammar.accept(token), (token, text_of(tokens))
        if token == END:
            return Played(tokens, True)
        tokens.append(token)
    return Played(tokens, False)
