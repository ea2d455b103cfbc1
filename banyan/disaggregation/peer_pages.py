"""PeerTier: which pages go to a server that continues a prompt, and which come from one that has
computed it.

Both servers call a sequence by its room. A page is named by its room and its first token, so a name
means something only to those who know the room, whatever the size of their pages. Which pages a
prefix consists of follows from the groups: all of a FULL one, those in reach of the window of a
WINDOW one, and of a STATE one that behind its last unit.

As with a store (kv_cache/hierarchical_cache.py), pages go once the step that wrote them is
complete and their bytes are taken in the order of plans, so that nothing is locked meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import NO_STEP
from banyan.kv_cache.epochs import Horizon
from banyan.kv_cache.groups import STATE, WINDOW, CacheGroup
from banyan.kv_cache.loads import Load, Loads
from banyan.kv_cache.radix_tree import Node
from banyan.messages.plan import PageCopy, device_page, peer_page

_COARSEST_TOKENS = 512
"""The other server may have so large pages, and end a prefix where its last whole one ends: what
windows read in front of that is given too. Beyond that it computes."""


@dataclass
class PeerTier:
    """Pages of one replica that go to rooms and come from them.

    Args:
        groups, unit, horizon, loads: of the cache.
        came: called with a node whose pages have come.
        first_needed: (group, units) -> the first unit of a prefix of so many whose pages it needs.
    """

    groups: Sequence[CacheGroup]
    unit: int
    horizon: Horizon
    loads: Loads
    first_needed: Callable[[CacheGroup, int], int]
    came: Callable[[Node], None] = lambda node: None
    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    """For the next plan, in the order in which they were decided."""
    _gifts: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Copy to a room -> the room."""
    _open: Counter[bytes] = field(default_factory=Counter[bytes])
    """Copies to each room under way."""

    def take_copies(self) -> list[PageCopy]:
        taken, self.copies = self.copies, []
        return taken

    def forget_copies(self) -> None:
        """Leave out what no plan has begun: the pages may be gone by then."""
        copies, self.copies = self.copies, []
        assert all(copy.id in self._gifts for copy in copies), "a load waits for a plan"
        self.end([], [copy.id for copy in copies])

    def pages_of(self, units: int) -> int:
        """Pages that are given of a prefix of so many units, all groups."""
        return sum(
            (units - self._first_given(group, units)) * len(self._positions(group, 0))
            for group in self.groups
        )

    def give(self, room: bytes, node: Node, at: int, units: int) -> None:
        """Begin to give the pages of unit `at` of a prefix of `units`; those that are not there any
        more are left out."""
        assert node.promised == NO_STEP
        for g, group in enumerate(self.groups):
            if at < self._first_given(group, units):
                continue
            for position, page in zip(self._positions(group, at), node.pages[g], strict=False):
                copy_id = self.horizon.new_copy()
                self._gifts[copy_id] = room
                self._open[room] += 1
                place = peer_page(room, position)
                self.copies.append(PageCopy(copy_id, g, device_page(page), place, "before"))

    def is_giving(self, room: bytes) -> bool:
        """Whether pages are on their way to a room."""
        return room in self._open

    def load(
        self,
        room: bytes,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        units: int,
    ) -> tuple[Load, int] | None:
        """Begin to bring the units after `path`, a fresh match, of a prefix of `units`: the load
        and its number of pages. None (and nothing begun) without room.

        tree_keys: of the units to bring.
        """
        sources = [
            [
                [
                    peer_page(room, position)
                    for position in self._positions(group, at)
                    if at >= self.first_needed(group, units)
                ]
                for group in self.groups
            ]
            for at in range(len(path), units)
        ]
        begun = self.loads.begin(namespace, path, tree_keys, sources)
        if begun is None:
            return None
        load, copies = begun
        self.copies += copies
        return load, len(copies)

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended; those that are not this tier's are left alone."""
        for copy_id in (*ids, *failed):
            room = self._gifts.pop(copy_id, None)
            if room is None:
                self.loads.end(copy_id, copy_id not in failed, self._passed)
                continue
            self._open[room] -= 1
            if not self._open[room]:
                del self._open[room]

    def _positions(self, group: CacheGroup, at: int) -> range:
        """What the pages of unit `at` are called by: their first tokens, and a state by the number
        of tokens before it."""
        first, last = at * self.unit, (at + 1) * self.unit
        if group.kind == STATE:
            return range(last, last + 1)
        return range(first, last, group.page_tokens)

    def _first_given(self, group: CacheGroup, units: int) -> int:
        """As `first_needed`, of the shortest prefix that the other server may make of it."""
        if group.kind == WINDOW:
            units = max(0, units - -(-_COARSEST_TOKENS // self.unit))
        return self.first_needed(group, units)

    def _passed(self, load: Load, at: int, node: Node | None) -> None:
        if node is not None:
            self.came(node)
