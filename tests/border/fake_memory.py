"""What the fake device holds: of pages and stores, and of each slot."""

from dataclasses import dataclass, field

from tests.border import oracle
from tests.border.laws import Tenancy


@dataclass(frozen=True)
class Poison:
    """What a fault left behind. Plans launched before the engine heard of it may read it."""

    step: int


Content = int | Poison | None
"""Hash of the sequence up to and with a position; None = never written."""


Stored = dict[tuple[int, bytes], list[Content]]
"""What a store holds, by group and key."""


@dataclass
class Slot(Tenancy):
    """The device's memory of one slot, from join to leave."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    masked_state: int = 0
    """Hash of the output, for the masks."""
    drafts: list[int] = field(default_factory=list)
    poison: Poison | None = None

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on: they were sampled, and did not count."""
        tokens = self.tokens[:length]
        self.tokens, self.hashes, self.masked_state, self.drafts = [], self.hashes[:1], 0, []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(oracle.mix(self.hashes[-1], token))
        if len(self.tokens) > self.join.prompt_len:
            self.masked_state = oracle.mix(self.masked_state, token)
