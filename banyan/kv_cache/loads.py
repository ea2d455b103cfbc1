"""Loads: pages on their way to the device from where they were kept, a store or another server.

Their pages are taken from the pools and belong here until their copies end; then they are nodes
like any others. A copy that fails leaves no trace: its tokens are computed instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import PageId
from banyan.kv_cache.epochs import NEVER_USED, Horizon
from banyan.kv_cache.page_pool import PagePool
from banyan.kv_cache.radix_tree import Node, RadixTree
from banyan.messages.plan import PageAt, PageCopy, device_page

Sources = Sequence[Sequence[PageAt]]
"""Of one unit, by group: where its pages come from; none where a prefix needs none of them."""


@dataclass
class Unit:
    """One unit on its way."""

    pages: list[list[PageId]]
    """By group."""
    open: int
    is_good: bool = True


@dataclass
class Load:
    """Consecutive units of one prefix on their way."""

    namespace: bytes
    first: int
    units: list[Unit]
    tree_keys: list[bytes]
    parent: Node | None
    """The deepest node of the prefix that is there; None = the namespace."""
    names: list[bytes] = field(default_factory=list[bytes])
    """What the store calls its units."""
    came: int = 0
    """Units that have become nodes."""
    passed: int = 0
    """Units whose end has been dealt with, in order."""
    is_broken: bool = False
    """A unit before the next one is not there: those that still come are of no use."""

    @property
    def is_over(self) -> bool:
        return self.passed == len(self.units)


Passed = Callable[[Load, int, Node | None], None]
"""Told of each unit that is dealt with: its load, its index there, and its node if it came."""


@dataclass
class Loads:
    """Every load of one replica.

    Args:
        make_room: whether so many pages per group are free, or could be made so.
    """

    pools: list[PagePool]
    tree: RadixTree
    horizon: Horizon
    make_room: Callable[[list[int]], bool]
    _open: list[Load] = field(default_factory=list[Load])
    _copies: dict[int, tuple[Load, int]] = field(default_factory=dict[int, tuple[Load, int]])
    """Copy -> its load, and which of its units."""

    def begin(
        self,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        sources: Sequence[Sources],
    ) -> tuple[Load, list[PageCopy]] | None:
        """Begin to bring the units after `path`, a fresh match; None (and nothing begun) without
        room.

        tree_keys, sources: of these units.
        """
        wanted = [sum(len(unit[g]) for unit in sources) for g in range(len(self.pools))]
        if not self._make_room_beside(path, wanted):
            return None
        taken = [iter(pool.take(n)) for pool, n in zip(self.pools, wanted, strict=True)]
        units = [
            Unit(
                [[next(free) for _ in of_group] for free, of_group in zip(taken, of, strict=True)],
                sum(map(len, of)),
            )
            for of in sources
        ]
        load = Load(namespace, len(path), units, list(tree_keys), path[-1] if path else None)
        self._open.append(load)
        copies: list[PageCopy] = []
        for at, (unit, of) in enumerate(zip(units, sources, strict=True)):
            for g, (pages, places) in enumerate(zip(unit.pages, of, strict=True)):
                for page, place in zip(pages, places, strict=True):
                    copy_id = self.horizon.new_copy()
                    self.horizon.open_loads[copy_id] = None
                    self._copies[copy_id] = load, at
                    copies.append(PageCopy(copy_id, g, place, device_page(page), "before"))
        return load, copies

    def end(self, copy_id: int, is_good: bool, passed: Passed) -> None:
        """A copy has ended; one of others is left alone."""
        found = self._copies.pop(copy_id, None)
        if found is None:
            return
        del self.horizon.open_loads[copy_id]
        load, at = found
        unit = load.units[at]
        unit.open -= 1
        unit.is_good = unit.is_good and is_good
        self.advance(load, passed)
        if load.is_over:
            self._open.remove(load)

    def advance(self, load: Load, passed: Passed) -> None:
        """Deal with the ends of a load's units, in order."""
        while not load.is_over and not load.units[load.passed].open:
            at = load.passed
            load.passed += 1
            passed(load, at, self._enter(load, load.units[at], load.tree_keys[at]))

    def held(self, group: int) -> list[PageId]:
        """Pages that wait for their bytes."""
        return [
            page
            for load in self._open
            for u in load.units[load.passed :]
            for page in u.pages[group]
        ]

    def _enter(self, load: Load, unit: Unit, tree_key: bytes) -> Node | None:
        """The new node that a unit has become; None when there was one, or it is of no use."""
        is_lost = load.parent is not None and not load.parent.is_attached
        load.is_broken = load.is_broken or not unit.is_good or is_lost
        if load.is_broken:
            for g, pages in enumerate(unit.pages):
                self.pools[g].release(pages, NEVER_USED)
            return None
        node, is_new = self.tree.insert(load.namespace, load.parent, tree_key)
        load.parent = node
        load.came += 1
        for g, pages in enumerate(unit.pages):
            if not pages:
                continue
            if node.pages[g]:  # somebody has computed it meanwhile
                self.pools[g].release(pages, NEVER_USED)
            else:
                self.tree.attach(node, g, pages, NEVER_USED)
        return node if is_new else None

    def _make_room_beside(self, path: Sequence[Node], wanted: list[int]) -> bool:
        """Whether each group has so many free pages; those on `path` are not evicted for them."""
        groups = range(len(self.pools))
        for node in path:
            self.tree.touch(node, node.priority)
            for g in groups:
                self.tree.lock(node, g)
        has_room = self.make_room(wanted)
        for node in reversed(path):
            for g in groups:
                self.tree.unlock(node, g, node.stamps[g])
        return has_room
