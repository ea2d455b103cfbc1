"""Match and Lease: a cached prefix that was found, and the pages that a running request holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from banyan.base.ids import PageId, SlotId
from banyan.kv_cache.groups import FULL, CacheGroup
from banyan.kv_cache.radix_tree import Node


@dataclass(frozen=True)
class PartialMatch:
    """A block of the tree whose first `tokens` tokens match (kv_cache/partial_blocks.py)."""

    node: Node
    tokens: int


@dataclass(frozen=True)
class Match:
    """Longest usable prefix of a request, found by `KVCache.probe`; valid until the cache
    changes.
    """

    path: list[Node]
    tokens: int
    """Matched tokens, in the path and in the partial block."""
    fork: int = 0
    """Length of the prefix that other requests have computed too; a state there would be useful."""
    partial: PartialMatch | None = None
    """A partly matching block after the path; its pages are copied."""

    @property
    def whole_blocks(self) -> "Match":
        """The match without the partial block."""
        if self.partial is None:
            return self
        return Match(self.path, self.tokens - self.partial.tokens)


@dataclass
class Lease:
    """The pages of one running request, from `KVCache.lease` to `KVCache.release`.

    Its page table in a FULL group looks like this:

        | cached: locked tree nodes | private: pages that the lease owns | not granted |
        0                 path length × block size                    granted
    """

    slot: SlotId
    namespace: bytes
    priority: int
    path: list[Node] = field(default_factory=list[Node])
    """Nodes of the prefix, from the root; all of them locked in the FULL groups."""
    tables: list[list[PageId]] = field(default_factory=list[list[PageId]])
    """Per group, the page at each table index; padding where a window page was released."""
    private: list[dict[int, PageId]] = field(default_factory=list[dict[int, PageId]])
    """Per group, the table indices whose pages this lease owns."""
    locked: list[dict[int, Node]] = field(default_factory=list[dict[int, Node]])
    """Per group, path index -> node that this lease locks."""
    fork: int = 0
    """`Match.fork` of the prefix that it began with."""
    partial: PartialMatch | None = None
    """The block to copy after the path; locked until the copy has ended."""

    def missing_pages(self, groups: Sequence[CacheGroup], tokens: int) -> list[int]:
        """Per group, pages still needed for `tokens` positions."""
        return [
            max(0, group.pages_for(tokens) - len(self.tables[g])) for g, group in enumerate(groups)
        ]

    def has_copies(self, groups: Sequence[CacheGroup], block_size: int) -> bool:
        """Whether it owns pages whose content the nodes of its path hold as well."""
        return any(
            index * group.page_tokens < len(self.path) * block_size
            for g, group in enumerate(groups)
            if group.kind == FULL
            for index in self.private[g]
        )
