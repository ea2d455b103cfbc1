"""PeerTier: which pages go to a server that continues a prompt, and which come from one that has
computed it.

Both servers call a sequence by its room. A page is named by its room, its unit and its place in
the unit, so a name means something only to those who know the room. Which pages a prefix consists
of follows from the groups: all of a FULL one, those in reach of the window of a WINDOW one, and of
a STATE one that behind its last unit.

As with a store (memory/tiers.py), pages go once the step that wrote them is complete and their
bytes are taken in the order of plans, so that nothing is locked meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import NO_STEP
from banyan.memory.groups import CacheGroup
from banyan.memory.loads import Load, Loads
from banyan.memory.radix import Node
from banyan.memory.stamps import Horizon
from banyan.messages.plan import PageCopy, device_page, peer_page


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
        """Pages that a prefix of so many units consists of, all groups."""
        return sum(
            (units - self.first_needed(group, units)) * (self.unit // group.page_tokens)
            for group in self.groups
        )

    def give(self, room: bytes, node: Node, at: int, units: int) -> None:
        """Begin to give the pages of unit `at` of a prefix of `units`; those that are not there any
        more are left out."""
        assert node.promised == NO_STEP
        for g, group in enumerate(self.groups):
            if at < self.first_needed(group, units):
                continue
            for part, page in enumerate(node.pages[g]):
                copy_id = self.horizon.new_copy()
                self._gifts[copy_id] = room
                self._open[room] += 1
                place = peer_page(room, at, part)
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
                    peer_page(room, at, part)
                    for part in range(self.unit // group.page_tokens)
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

    def _passed(self, load: Load, at: int, node: Node | None) -> None:
        if node is not None:
            self.came(node)
