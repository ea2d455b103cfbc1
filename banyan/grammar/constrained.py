"""Constrained: a library's matcher made into a Grammar. Adds what no library needs to know: end
tokens, special tokens, and the free beginning before a constraint.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from banyan.grammar.base import Matcher
from banyan.grammar.vocabulary import Vocabulary
from banyan.messages.requests import FREE, JSON_SCHEMA, Constraint

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class TokenMasks:
    """The masks of a vocabulary that no constraint changes: int32 [words] each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        self.end_ids = frozenset(vocabulary.end_ids)
        self.end = vocabulary.bits(vocabulary.end_ids)
        self._vocabulary = vocabulary
        self.free = vocabulary.bits(range(vocabulary.size)) & ~self.end
        """Before the constraint begins everything goes but an end: the answer is still to come."""
        special = {id: tokens[id].decode("utf-8", "replace") for id in vocabulary.special_ids}
        self._special = {text: vocabulary.bits([id]) for id, text in special.items() if text}
        empty = [id for id, token in enumerate(tokens) if not token]
        self._plain = self.free & ~vocabulary.bits([*special, *empty])
        control = [id for id, token in enumerate(tokens) if _CONTROL.search(token)]
        self._json = self._plain & ~vocabulary.bits(control)

    def only(self, id: int) -> np.ndarray:
        return self._vocabulary.bits([id])

    def text(self, constraint: Constraint) -> np.ndarray:
        """What may be part of a constrained text: special tokens only where it names them.

        JSON has control characters between its parts only, and there line breaks do; libraries
        that turn a schema into a regex let some into strings.
        """
        if constraint.kind == FREE:
            return self.free
        mask = self._json if constraint.kind == JSON_SCHEMA else self._plain
        for text, bit in self._special.items():
            if text in constraint.text:
                mask = mask | bit
        return mask


class AnyText:
    """Satisfies grammar.base.Matcher: any output."""

    problem = ""

    def fill(self, mask: np.ndarray) -> None:
        mask.fill(-1)

    def forced(self) -> list[int]:
        return []

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        """Nothing to undo."""

    def is_complete(self) -> bool:
        return True


class Constrained:
    """Satisfies grammar.base.Grammar.

    Args:
        text: tokens that may be part of the text, `TokenMasks.text` of its constraint.
        after: token ids that end the free beginning; () when there is none.
        budget, opening: as in Constraint.
    """

    def __init__(
        self,
        matcher: Matcher,
        masks: TokenMasks,
        text: np.ndarray,
        after: Sequence[int] = (),
        budget: int = 0,
        opening: Sequence[int] = (),
    ) -> None:
        self._budget = max(budget, len(opening)) if budget else 0
        self._opening = tuple(opening)
        self._may_end = isinstance(matcher, AnyText)
        """The output may end in the free beginning."""
        self._matcher = matcher
        self._masks = masks
        self._text = text
        self._after = tuple(after)
        self._free: list[int] = []
        """Tokens of the beginning."""
        self._num_matched = 0
        """Tokens that the matcher has accepted."""
        self._num_ends = 0
        self._failure = ""

    @property
    def is_ended(self) -> bool:
        return self._num_ends > 0

    @property
    def problem(self) -> str:
        return self._failure or self._matcher.problem

    def mask(self) -> bytes:
        if self._is_free:
            if (left := self._closing()) is not None:
                return self._masks.only(left[0]).tobytes()
            free = self._masks.free | self._masks.end if self._may_end else self._masks.free
            return free.tobytes()
        if self._num_ends:
            return self._masks.end.tobytes()
        mask = np.zeros_like(self._text)
        if self._failure or not self._asked(lambda: self._matcher.fill(mask)):
            return np.zeros_like(self._text).tobytes()
        mask &= self._text
        if self._matcher.is_complete():
            mask |= self._masks.end
        return mask.tobytes()

    def forced(self) -> list[int]:
        if self._is_free:
            return list(self._closing() or ())
        if self._num_ends:
            return []
        found: list[int] = []
        self._asked(lambda: found.extend(self._matcher.forced()))
        may = self._text.view(np.uint32)
        wrong = (i for i, id in enumerate(found) if not may[id // 32] >> np.uint32(id % 32) & 1)
        return found[: next(wrong, len(found))]

    def accept(self, token: int) -> bool:
        if self._is_free:
            left = self._closing()
            if left is not None and token != left[0]:
                return False
            if token in self._masks.end_ids and not self._may_end:
                return False
            if token in self._masks.end_ids and left is None:
                self._num_ends += 1
            else:
                self._free.append(token)
        elif token in self._masks.end_ids:
            if not self._num_ends and not self._matcher.is_complete():
                return False
            self._num_ends += 1
        elif self._num_ends or self._failure or not self._takes(token):
            return False
        else:
            self._num_matched += 1
        return True

    def rollback(self, count: int) -> None:
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        matched = min(count - ends, self._num_matched)
        if matched:
            self._num_matched -= matched
            self._matcher.rollback(matched)
        free = count - ends - matched
        assert free <= len(self._free), f"{count} tokens cannot be undone"
        if free:
            del self._free[-free:]

    def _closing(self) -> tuple[int, ...] | None:
        """What is left of the forced end of the beginning; None within the budget.

        A beginning that ends with a part of `after` when the budget is used up goes on from there.
        """
        past = len(self._free) - self._budget
        if not self._budget or past < 0 or tuple(self._free[: len(self._opening)]) != self._opening:
            return None
        size = len(self._after)
        begun = next(
            n
            for n in range(min(size - 1, self._budget), -1, -1)
            if tuple(self._free[self._budget - n : self._budget]) == self._after[:n]
        )
        return self._after[begun + past :]

    def _takes(self, token: int) -> bool:
        taken: list[bool] = []
        return self._asked(lambda: taken.append(self._matcher.accept(token))) and taken[0]

    def _asked(self, question: Callable[[], None]) -> bool:
        """Whether the library answered. One that fails has given up this constraint, whose request
        ends with its words; the others go on."""
        try:
            question()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        return not self._failure

    @property
    def _is_free(self) -> bool:
        if not self._after or self._num_matched or self._num_ends:
            return False
        return tuple(self._free[-len(self._after) :]) != self._after
