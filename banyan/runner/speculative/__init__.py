"""Drafter: the protocol of speculative decoding; it proposes next tokens, the model verifies them.
DRAFTERS: the drafters by name. A plug-in names itself in the entry points `banyan.drafters`.

A draft changes how many steps a request takes, never its tokens (drafting.py). Every rank has its
own drafter, and all must propose the same: a drafter may depend only on the calls it receives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from banyan.base.draft_tree import paths_of
from banyan.base.table import Table
from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import Row

if TYPE_CHECKING:  # drafter names are looked up in processes without torch
    from banyan.runner.speculative.draft_runner import DraftRunner


@dataclass(frozen=True)
class Tree:
    """A draft tree.

    Attributes:
        tokens: likeliest first, each after its parent; children of one parent differ.
        parents: index of the token that each one follows; -1 = the newest token of the slot.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(map(len, paths_of(self.parents))) - 1


Guess = Sequence[int] | Tree
"""A chain of drafts, or a tree."""


class Drafter(Protocol):
    """Follows the tokens of each slot from `join` to `leave`."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        """A request takes a slot with these tokens. What the drafter learns from it may be used for
        requests of the same namespace only."""
        ...

    def leave(self, slot: int) -> None: ...

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """From position `first` on, the slot holds exactly these tokens."""
        ...

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Guess]:
        """Drafts for the slots of a step, after its rows have run and `extend` was called.

        rows: of the step, as they ran; counts: most drafts of each row.
        returns: by row; empty if nothing is likely. Trees only if the flags ask for them.
        """
        ...

    def flush(self) -> None:
        """Forget everything. No request runs; slots that were not left are empty."""
        ...


DrafterFactory = Callable[[SpeculativeConfig, Callable[[], "DraftRunner"]], Drafter]
"""Makes a drafter. The second argument opens the draft model that the flags name."""


DRAFTERS: Table[DrafterFactory] = Table(
    "drafter",
    {
        "NGRAM": "banyan.runner.speculative.ngram:open_ngram",
        "DFLASH": "banyan.runner.speculative.dflash:open_block",
        "EAGLE": "banyan.runner.speculative.eagle:open_hidden",
        "EAGLE3": "banyan.runner.speculative.eagle:open_hidden",
        "NEXTN": "banyan.runner.speculative.eagle:open_hidden",
        "STANDALONE": "banyan.runner.speculative.standalone:open_standalone",
    },
    plugins="banyan.drafters",
)


def common_beginning(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix."""
    for count, (old, new) in enumerate(zip(known, tokens, strict=False)):
        if old != new:
            return count
    return min(len(known), len(tokens))
