"""What a drafter is: it guesses the next tokens of a slot, and the model checks them in one row.

A guess changes how many steps an answer takes, never the answer (verify.py). With several ranks
each has a drafter of its own, and all must guess alike: a drafter depends on the calls that it
gets and on nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from banyan.config.schema import SpeculativeConfig


class Drafter(Protocol):
    """Knows the tokens of each slot between `join` and `leave`."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        """A request takes a slot with these tokens. What is learnt from it may be told to requests
        of the same namespace, and to no others."""
        ...

    def leave(self, slot: int) -> None: ...

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """From position `first` on the slot holds these tokens, and nothing behind them."""
        ...

    def propose(self, slot: int, count: int) -> Sequence[int]:
        """What may come next in the slot: at most `count` tokens, none when nothing is likely."""
        ...


DrafterFactory = Callable[[SpeculativeConfig], Drafter]
