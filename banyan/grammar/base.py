"""What the scheduler needs of a constraint on the output: masks in, tokens out.

Bit i of a mask (little-endian within the byte string) = token i is allowed next.
"""

from collections.abc import Callable
from typing import Protocol


class Grammar(Protocol):
    """One request's constraint at its current position."""

    def mask(self) -> bytes:
        """Which tokens may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Move past `token`; False (and nothing moved) when it is not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...


GrammarFactory = Callable[[str], Grammar]
"""From `Generate.grammar` to a fresh constraint; RequestError when it cannot be had."""


def masks_for(grammar: Grammar, drafts: list[int]) -> bytes:
    """drafts + 1 masks: before the first draft, and after each of them.

    A draft that is not allowed is rejected by its own mask, so what follows it is never reached
    and only fills its place.
    """
    masks = [grammar.mask()]
    accepted = 0
    for draft in drafts:
        if accepted < len(masks) - 1 or not grammar.accept(draft):
            masks.append(masks[-1])
            continue
        accepted += 1
        masks.append(grammar.mask())
    grammar.rollback(accepted)
    return b"".join(masks)
