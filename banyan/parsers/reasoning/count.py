"""How many tokens of an answer were thinking, for the usage that is reported."""

from collections.abc import Sequence


class ThinkingTokens:
    """Counts up to and with the token that ends the thinking.

    Args:
        end: id of that token; None where the mark is not one token: then up to the first token of
            the answer.
    """

    def __init__(self, end: int | None) -> None:
        self.count = 0
        self._end = end
        self._is_over = False

    def take(self, tokens: Sequence[int], has_answered: bool) -> None:
        """Tokens of one chunk, and whether some of the answer has come with it."""
        if self._is_over:
            return
        if self._end is not None and self._end in tokens:
            self.count += list(tokens).index(self._end) + 1
            self._is_over = True
        elif has_answered:
            self._is_over = True
        else:
            self.count += len(tokens)
