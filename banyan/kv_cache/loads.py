"""PrefixLoads: pages that are being loaded from a store or from another server.

Their pages are taken from the pools and belong here until their copies end; then they are nodes
like any others. A copy that fails leaves no trace: its tokens are computed instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import PageId
from banyan.kv_cache.epochs import NEVER_USED, EpochTracker
from banyan.kv_cache.page_pool import PagePool
from banyan.kv_cache.radix_tree import Node, RadixTree
from banyan.messages.plan import PageAt, PageCopy, device_page

Sources = Sequence[Sequence[PageAt]]
"""Of one block, by group: where its pages come from; none where a prefix needs none of them."""


@dataclass
class LoadingBlock:
    """One block on its way."""

    pages: list[list[PageId]]
    """By group."""
    open: int
    is_good: bool = True


@dataclass
class PrefixLoad:
    """Consecutive units of one prefix on their way."""

    namespace: bytes
    first: int
    blocks: list[LoadingBlock]
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
    """A block before the next one is not there: those that still come are of no use."""

    @property
    def is_over(self) -> bool:
        return self.passed == len(self.blocks)


Passed = Callable[[PrefixLoad, int, Node | None], None]
"""Told of each block that is dealt with: its load, its index there, and its node if it came."""


@dataclass
class PrefixLoads:
    """Every load of one replica.

    Args:
        make_room: whether so many pages per group are free, or could be made so.
    """

    pools: list[PagePool]
    tree: RadixTree
    epochs: EpochTracker
    make_room: Callable[[list[int]], bool]
    _open: list[PrefixLoad] = field(default_factory=list[PrefixLoad])
    _copies: dict[int, tuple[PrefixLoad, int]] = field(
        default_factory=dict[int, tuple[PrefixLoad, int]]
    )
    """Copy -> its load, and which of its units."""

    def begin(
        self,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        sources: Sequence[Sources],
    ) -> tuple[PrefixLoad, list[PageCopy]] | None:
        """Begin to bring the units after `path`, a fresh match; None (and nothing begun) without
        room.

        tree_keys, sources: of these units.
        """
        wanted = [sum(len(block[g]) for block in sources) for g in range(len(self.pools))]
        if not self._make_room_beside(path, wanted):
            return None
        taken = [iter(pool.take(n)) for pool, n in zip(self.pools, wanted, strict=True)]
        blocks = [
            LoadingBlock(
                [[next(free) for _ in of_group] for free, of_group in zip(taken, of, strict=True)],
                sum(map(len, of)),
            )
            for of in sources
        ]
        load = PrefixLoad(namespace, len(path), blocks, list(tree_keys), path[-1] if path else None)
        self._open.append(load)
        copies: list[PageCopy] = []
        for at, (block, of) in enumerate(zip(blocks, sources, strict=True)):
            for g, (pages, places) in enumerate(zip(block.pages, of, strict=True)):
                for page, place in zip(pages, places, strict=True):
                    copy_id = self.epochs.new_copy()
                    self.epochs.open_loads[copy_id] = None
                    self._copies[copy_id] = load, at
                    copies.append(PageCopy(copy_id, g, place, device_page(page), "before"))
        return load, copies

    def end(self, copy_id: int, is_good: bool, passed: Passed) -> None:
        """A copy has ended; one of others is left alone."""
        found = self._copies.pop(copy_id, None)
        if found is None:
            return
        del self.epochs.open_loads[copy_id]
        load, at = found
        block = load.blocks[at]
        block.open -= 1
        block.is_good = block.is_good and is_good
        self.advance(load, passed)
        if load.is_over:
            self._open.remove(load)

    def advance(self, load: PrefixLoad, passed: Passed) -> None:
        """Deal with the ends of a load's units, in order."""
        while not load.is_over and not load.blocks[load.passed].open:
            at = load.passed
            load.passed += 1
            passed(load, at, self._enter(load, load.blocks[at], load.tree_keys[at]))

    def held(self, group: int) -> list[PageId]:
        """Pages that wait for their bytes."""
        return [
            page
            for load in self._open
            for u in load.blocks[load.passed :]
            for page in u.pages[group]
        ]

    def _enter(self, load: PrefixLoad, block: LoadingBlock, tree_key: bytes) -> Node | None:
        """The new node that a block has become; None when there was one, or it is of no use."""
        is_lost = load.parent is not None and not load.parent.is_attached
        load.is_broken = load.is_broken or not block.is_good or is_lost
        if load.is_broken:
            for g, pages in enumerate(block.pages):
                self.pools[g].release(pages, NEVER_USED)
            return None
        node, is_new = self.tree.insert(load.namespace, load.parent, tree_key)
        load.parent = node
        load.came += 1
        for g, pages in enumerate(block.pages):
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
        has_capacity = self.make_room(wanted)
        for node in reversed(path):
            for g in groups:
                self.tree.unlock(node, g, node.epochs[g])
        return has_capacity
