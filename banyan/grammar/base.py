"""What the scheduler needs of a constraint on the output (masks in, tokens out), and what a backend
must provide for it.

Bit i of a mask (little-endian within the byte string) = token i is allowed next.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from banyan.base.table import Table
from banyan.messages.requests import Constraint

if TYPE_CHECKING:  # numpy: the server's process reads names of backends here, and has none
    import numpy as np

    from banyan.grammar.vocabulary import Encode, Vocabulary


class Grammar(Protocol):
    """One request's constraint at its current position."""

    @property
    def is_ended(self) -> bool:
        """The output is complete: an end token has been accepted."""
        ...

    @property
    def problem(self) -> str:
        """Why the library follows the constraint no further, in its words; "" while it does."""
        ...

    def mask(self) -> bytes:
        """Which tokens may come next; no bit is set at a dead end."""
        ...

    def forced(self) -> list[int]:
        """The tokens that come next whatever is sampled, as far as they are certain."""
        ...

    def accept(self, token: int) -> bool:
        """Move past `token`; False (and nothing moved) when it is not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...


GrammarFactory = Callable[[str], Grammar]
"""From `Generate.grammar` to a fresh constraint; RequestError when it cannot be had."""


class Matcher(Protocol):
    """A library's view of one output. It sees tokens as text and never an end token."""

    @property
    def problem(self) -> str:
        """As of Grammar."""
        ...

    def fill(self, mask: "np.ndarray") -> None:
        """Write which tokens may come next: int32 [words], bit i of the whole = token i."""
        ...

    def forced(self) -> list[int]:
        """The tokens in which the model itself would write what must come next; [] when several
        texts may, or none at all. A last one that might go on otherwise is left out."""
        ...

    def accept(self, token: int) -> bool:
        """Move past `token`; False (and nothing moved) when it is not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        ...


class Program(Protocol):
    """A compiled constraint, shared by the requests that have it."""

    size_bytes: int

    def start(self) -> Matcher:
        """A matcher at the beginning. Takes microseconds."""
        ...


class Backend(Protocol):
    """A library. `compile` runs in a process of its own, `load` in the engine's.

    Both may raise anything with a message for the caller; it ends the requests that asked.
    """

    def compile(self, constraint: Constraint) -> bytes:
        """Everything that is slow or dangerous; the result goes to `load`."""
        ...

    def load(self, compiled: bytes) -> Program:
        """Takes milliseconds; runs in a thread next to the engine's loop."""
        ...


BackendFactory = Callable[["Vocabulary", "Encode", str | None], Backend]
"""From the vocabulary, the way to write text in it, and the pattern of white space between JSON
tokens; "" = none, None = any."""

BACKENDS: Table[BackendFactory] = Table(
    "grammar backend",
    {
        "xgrammar": "banyan.grammar.xgrammar:XGrammar",
        "llguidance": "banyan.grammar.llguidance:LLGuidance",
        "outlines": "banyan.grammar.outlines:Outlines",
    },
    plugins="banyan.grammars",
)


_LIGHT = "llguidance"
"""Comes with every installation, compiles in milliseconds, and honours the most."""


def stand_ins(name: str) -> tuple[str, ...]:
    """The backend `name`, and what compiles the constraints that it refuses."""
    return (name,) if name == _LIGHT or find_spec(_LIGHT) is None else (name, _LIGHT)


def masks_for(grammar: Grammar, drafts: list[int], parents: list[int] | None = None) -> bytes:
    """drafts + 1 masks: before the first draft, and after each of them.

    parents: of drafts that branch (base/draft_tree.py); none for a chain. A draft that is not
    allowed is rejected by its own mask, so what follows it is never reached and only fills its
    place.
    """
    if parents:
        return b"".join(_masks_of(grammar, drafts, parents[: len(drafts)]))
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


def _masks_of(grammar: Grammar, drafts: list[int], parents: list[int]) -> list[bytes]:
    """The masks of a draft tree: one for each draft, after its ancestors."""
    first = grammar.mask()
    masks = [first] * (len(drafts) + 1)
    here = list[int]()
    """The drafts that the grammar has accepted; the others are visited depth first."""
    left = [at for at in reversed(range(len(drafts))) if parents[at] < 0]
    while left:
        at = left.pop()
        while here and here[-1] != parents[at]:
            grammar.rollback(1)
            here.pop()
        if not grammar.accept(drafts[at]):
            continue
        here.append(at)
        masks[at + 1] = grammar.mask()
        left += [child for child in reversed(range(len(drafts))) if parents[child] == at]
    grammar.rollback(len(here))
    return masks
