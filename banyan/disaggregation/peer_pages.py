"""PeerTier: pages that a prefill server sends and a decode server receives.

Both servers name a page by its transfer id and its first token, which works for any page size. The
groups determine the pages of a prefix: all pages of a FULL group, those within the window of a
WINDOW group, and the state after the last block of a STATE group.

As with a store (kv_cache/hierarchical_cache.py), pages are sent after the step that wrote them is
complete. Their bytes are read in plan order, so nothing needs a lock meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import NO_STEP
from banyan.kv_cache.loads import PrefixLoad, PrefixLoads
from banyan.kv_cache.page_pool import EpochTracker
from banyan.kv_cache.radix_tree import Node
from banyan.kv_cache.sizing import STATE, WINDOW, CacheGroup
from banyan.messages.plan import PageCopy, device_page, peer_page

_COARSEST_TOKENS = 512
"""The decode server may have pages of up to this size and end a prefix at its last whole page. So
the window before that point is sent too. With larger pages it computes the rest."""


@dataclass
class PeerTier:
    """The pages that one replica sends to and receives from other servers.

    Args:
        groups, block_size, epochs, loads: of the cache.
        on_stored: called with a node whose pages have arrived.
    """

    groups: Sequence[CacheGroup]
    block_size: int
    epochs: EpochTracker
    loads: PrefixLoads
    on_stored: Callable[[Node], None] = lambda node: None
    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    """For the next plan, in order."""
    _sends: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Copy id -> transfer id."""
    _open: Counter[bytes] = field(default_factory=Counter[bytes])
    """By transfer id, copies under way."""

    def take_copies(self) -> list[PageCopy]:
        taken, self.copies = self.copies, []
        return taken

    def forget_copies(self) -> None:
        """Drop the copies that are in no plan yet; their pages are about to be evicted."""
        copies, self.copies = self.copies, []
        assert all(copy.id in self._sends for copy in copies), "a load waits for a plan"
        self.end([], [copy.id for copy in copies])

    def pages_of(self, blocks: int) -> int:
        """Pages that are sent for a prefix of `blocks` blocks, all groups."""
        return sum(
            (blocks - self._first_sent(group, blocks)) * len(self._positions(group, 0))
            for group in self.groups
        )

    def send(self, transfer_id: bytes, node: Node, at: int, blocks: int) -> None:
        """Plan to send block `at` of a prefix of `blocks` blocks, without pages that are gone."""
        assert node.promised == NO_STEP
        for g, group in enumerate(self.groups):
            if at < self._first_sent(group, blocks):
                continue
            for position, page in zip(self._positions(group, at), node.pages[g], strict=False):
                copy_id = self.epochs.new_copy()
                self._sends[copy_id] = transfer_id
                self._open[transfer_id] += 1
                place = peer_page(transfer_id, position)
                self.copies.append(PageCopy(copy_id, g, device_page(page), place, "before"))

    def is_sending(self, transfer_id: bytes) -> bool:
        """Whether copies of this transfer are under way."""
        return transfer_id in self._open

    def load(
        self,
        transfer_id: bytes,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        blocks: int,
    ) -> tuple[PrefixLoad, int] | None:
        """Begin to load the blocks after `path`, a fresh match, of a prefix of `blocks` blocks.

        Args:
            tree_keys: keys of the blocks to load.

        Returns: the load and its number of pages; None (and nothing begun) without free pages.
        """
        sources = [
            [
                [
                    peer_page(transfer_id, position)
                    for position in self._positions(group, at)
                    if at >= group.first_needed(self.block_size, blocks)
                ]
                for group in self.groups
            ]
            for at in range(len(path), blocks)
        ]
        begun = self.loads.begin(namespace, path, tree_keys, sources)
        if begun is None:
            return None
        load, copies = begun
        self.copies += copies
        return load, len(copies)

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended. Ids of other owners are ignored."""
        for copy_id in (*ids, *failed):
            transfer_id = self._sends.pop(copy_id, None)
            if transfer_id is None:
                self.loads.end(copy_id, copy_id not in failed, self._on_settled)
                continue
            self._open[transfer_id] -= 1
            if not self._open[transfer_id]:
                del self._open[transfer_id]

    def _positions(self, group: CacheGroup, at: int) -> range:
        """Positions that name the pages of block `at`: their first tokens. A state is named by the
        number of tokens before it.
        """
        first, last = at * self.block_size, (at + 1) * self.block_size
        if group.kind == STATE:
            return range(last, last + 1)
        return range(first, last, group.page_tokens)

    def _first_sent(self, group: CacheGroup, blocks: int) -> int:
        """`first_needed` for the shortest prefix that the decode server may end up with."""
        if group.kind == WINDOW:
            blocks = max(0, blocks - -(-_COARSEST_TOKENS // self.block_size))
        return group.first_needed(self.block_size, blocks)

    def _on_settled(self, load: PrefixLoad, at: int, node: Node | None) -> None:
        if node is not None:
            self.on_stored(node)
