"""A drafter for the real runner of the border kit, which mostly knows the answers. What it says may
be wrong at every place, and no answer may show it."""

from collections.abc import Callable, Sequence
from random import Random

from banyan.messages.plan import Row
from tests.border.oracle import BARRED, VOCAB, Answer


class Prompter:
    """
    Args:
        answers: of the requests that are alive.
        good: share of the guesses that are right, where the answer is known.
    """

    def __init__(self, answers: Callable[[], list[Answer]], random: Random, good: float) -> None:
        self._answers = answers
        self._random = random
        self._good = good
        self._tokens: dict[int, list[int]] = {}

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        assert slot not in self._tokens, f"slot {slot} is joined twice"
        self._tokens[slot] = tokens

    def leave(self, slot: int) -> None:
        del self._tokens[slot]

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        mine = self._tokens[slot]
        assert first <= len(mine), f"slot {slot}: tokens from {first}, {len(mine)} are known"
        mine[first:] = tokens

    def flush(self) -> None: ...

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        pairs = zip(rows, counts, strict=True)
        return [self._guess(row.slot, count) if count else [] for row, count in pairs]

    def _guess(self, slot: int, count: int) -> list[int]:
        right = self._continuation(self._tokens[slot], count)
        guesses = [
            token if self._random.random() < self._good else self._random.randrange(VOCAB)
            for token in right
        ]
        return guesses[: self._random.choice((0, 1, count, count, count))]

    def _continuation(self, tokens: list[int], count: int) -> list[int]:
        for answer in self._answers():
            begun = len(tokens) - answer.prompt_len
            if begun < 0 or answer.tokens[: len(tokens)] != tokens[: len(answer.tokens)]:
                continue
            found = [answer.output(begun + i) for i in range(count)]
            if BARRED not in found and answer.tokens[: len(tokens)] == tokens:
                return found
        return [self._random.randrange(VOCAB) for _ in range(count)]
