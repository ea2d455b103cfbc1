"""What a drafter is: it guesses the next tokens of a slot, and the model checks them in one row.

A guess changes how many steps an answer takes, never the answer (verify.py). With several ranks
each has a drafter of its own, and all must guess alike: a drafter depends on the calls that it
gets and on nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from banyan.base.draft_tree import paths_of
from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import Row

if TYPE_CHECKING:  # names of drafters are looked up where no torch is loaded
    from torch import Tensor

    from banyan.ops.api import Ops
    from banyan.runner.forward import Forward
    from banyan.runner.sampling.sampler import Sampler
    from banyan.runner.slots import SlotTable
    from banyan.runner.speculative.drafting import PageEndStates, TargetHiddenStates


@dataclass(frozen=True)
class Tree:
    """Guesses that branch.

    Attributes:
        tokens: the likeliest first, none before the one that it follows; those that follow the same
            token differ.
        parents: for each which of them it follows, -1 = the newest token.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    @property
    def depth(self) -> int:
        """Tokens of the longest branch."""
        return max(map(len, paths_of(self.parents))) - 1


Guess = Sequence[int] | Tree
"""A chain, or branches."""


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

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Guess]:
        """What may come next in the slots of a step, once its rows have run and `extend` has told
        what they gave.

        rows: of the step, as they ran; counts: how many tokens may be drafted for each, at most.
        returns: by row, none where nothing is likely. Branches only where the flags ask for them.
        """
        ...

    def flush(self) -> None:
        """Forget everything. No request runs; slots that have not been left are empty."""
        ...


@dataclass(frozen=True)
class DraftRunner:
    """What the runner has for a drafter that is a model.

    Attributes:
        table: tokens, parameters and pages of the slots. It may write tokens behind the known ones.
        forward: the draft model over pages of its own, which go by the numbers of the target's.
        sampler: draws from the draft model's logits as from the target's.
        ops: that the draft model was made from.
        vocab_size: of its logits.
        max_tokens: of the largest step that is recorded; 0 = any.
        max_outputs: places in such a step that logits are made for; 0 = any.
        may_lag: its pages stay with a request as long as that runs, so what it has not read yet
            can be read later.
        target: what the model that it drafts for made of the last step.
        fetch: begins to bring tensors to the host; what waits for them.
        ends: of each page what it reads of the last token there; None where it reads tokens alone.
        take_in: makes what it reads of the target's hidden states.
        reader: writes what the draft model keeps of these; None where `forward` reads them beside
            tokens.
        mask: id of the token in the place of one that a block tells.
    """

    table: "SlotTable"
    forward: "Forward"
    sampler: "Sampler"
    ops: "Ops"
    vocab_size: int
    max_tokens: int
    max_outputs: int
    may_lag: bool
    target: "TargetHiddenStates"
    fetch: "Callable[[Sequence[Tensor]], Callable[[], list[Tensor]]]"
    ends: "PageEndStates | None" = None
    take_in: "Callable[[Tensor], Tensor] | None" = None
    reader: "Forward | None" = None
    mask: int = 0


DrafterFactory = Callable[[SpeculativeConfig, Callable[[], DraftRunner]], Drafter]
"""Makes a drafter. What it is given second opens the draft model that the flags name."""


def common_beginning(known: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of the two agree, from the first on."""
    for count, (old, new) in enumerate(zip(known, tokens, strict=False)):
        if old != new:
            return count
    return min(len(known), len(tokens))
