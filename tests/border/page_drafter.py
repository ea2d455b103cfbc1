"""A drafter for the real runner of the border kit, which mostly knows the answers. What it says may
be wrong at every place, and no answer may show it."""

from collections.abc import Callable, Sequence
from random import Random

from banyan.messages.plan import Row
from banyan.runner.speculative import Guess, Tree
from tests.border.oracle import BARRED, VOCAB, Answer


class Prompter:
    """
    Args:
        answers: of the requests that are alive.
        good: share of the guesses that are right, where the answer is known.
        branches: guesses are trees, with what is right in any of their branches.
    """

    def __init__(
        self,
        answers: Callable[[], list[Answer]],
        random: Random,
        good: float,
        branches: bool = False,
    ) -> None:
        self._answers = answers
        self._random = random
        self._good = good
        self._branches = branches
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

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Guess]:
        pairs = zip(rows, counts, strict=True)
        return [self._guess(row.slot, count) if count else [] for row, count in pairs]

    def _guess(self, slot: int, count: int) -> Guess:
        right = self._continuation(self._tokens[slot], count)
        guesses = [
            token if self._random.random() < self._good else self._random.randrange(VOCAB)
            for token in right
        ]
        most = self._random.choice((0, 1, count, count, count))
        return self._tree(guesses, most) if self._branches else guesses[:most]

    def _tree(self, guesses: list[int], count: int) -> Tree:
        """The beginning of a chain, with other guesses before, beside and behind it."""
        chain, here = list(guesses), -1
        tokens: list[int] = []
        parents: list[int] = []
        while len(tokens) < count:
            goes_on = bool(chain) and self._random.random() < 0.5
            parent = here if goes_on else self._random.randrange(-1, len(tokens))
            token = chain.pop(0) if goes_on else self._random.randrange(VOCAB)
            if (parent, token) in zip(parents, tokens, strict=True):
                chain = []
                continue
            parents.append(parent)
            tokens.append(token)
            here = len(tokens) - 1 if goes_on else here
        return Tree(tokens, parents)

    def _continuation(self, tokens: list[int], count: int) -> list[int]:
        for answer in self._answers():
            begun = len(tokens) - answer.prompt_len
            if begun < 0 or answer.tokens[: len(tokens)] != tokens[: len(answer.tokens)]:
                continue
            found = [answer.output(begun + i) for i in range(count)]
            if BARRED not in found and answer.tokens[: len(tokens)] == tokens:
                return found
        return [self._random.randrange(VOCAB) for _ in range(count)]
