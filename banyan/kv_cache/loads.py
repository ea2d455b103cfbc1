"""PrefixLoads: pages that are being loaded from a store or from another server.

A load owns its pages until their copies end; then the blocks become nodes like any others. A copy
that fails leaves no trace: its tokens are computed instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.base.ids import PageId
from banyan.kv_cache.page_pool import NEVER_USED, EpochTracker, PagePool
from banyan.kv_cache.radix_tree import CachedPages, Node
from banyan.messages.plan import PageAt, PageCopy, device_page

Sources = Sequence[Sequence[PageAt]]
"""For one block, by group: sources of its pages; none in groups where the prefix needs no page."""


@dataclass
class LoadingBlock:
    """One block that is being loaded."""

    pages: list[list[PageId]]
    """By group."""
    open: int
    """Copies that have not ended."""
    is_good: bool = True


@dataclass
class PrefixLoad:
    """Consecutive blocks of one prefix that are being loaded."""

    namespace: bytes
    first: int
    blocks: list[LoadingBlock]
    tree_keys: list[bytes]
    parent: Node | None
    """The deepest node of the prefix that is in the tree; None = the namespace."""
    names: list[bytes] = field(default_factory=list[bytes])
    """Store keys of its blocks."""
    arrived: int = 0
    """Blocks that have become nodes."""
    settled: int = 0
    """Blocks whose end has been processed, in order."""
    is_broken: bool = False
    """A block is missing, so the later ones are of no use."""

    @property
    def is_over(self) -> bool:
        return self.settled == len(self.blocks)


OnSettled = Callable[[PrefixLoad, int, Node | None], None]
"""Called with each settled block: its load, its index there, and its node if it is new."""


@dataclass
class PrefixLoads:
    """Every load of one replica.

    Args:
        make_free: evict until these pages per group are free; False if that is impossible.
    """

    pools: list[PagePool]
    cached: CachedPages
    epochs: EpochTracker
    make_free: Callable[[list[int]], bool]
    _open: list[PrefixLoad] = field(default_factory=list[PrefixLoad])
    _copies: dict[int, tuple[PrefixLoad, int]] = field(
        default_factory=dict[int, tuple[PrefixLoad, int]]
    )
    """Copy id -> (load, index of the block)."""

    def begin(
        self,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        sources: Sequence[Sources],
    ) -> tuple[PrefixLoad, list[PageCopy]] | None:
        """Begin to load the blocks after `path`, a fresh match.

        Args:
            tree_keys, sources: of these blocks.

        Returns: the load and its copies; None (and nothing begun) without free pages.
        """
        wanted = [sum(len(block[g]) for block in sources) for g in range(len(self.pools))]
        if not self._make_free_outside(path, wanted):
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

    def end(self, copy_id: int, is_good: bool, on_settled: OnSettled) -> None:
        """A copy has ended. Ids of other owners are ignored."""
        found = self._copies.pop(copy_id, None)
        if found is None:
            return
        del self.epochs.open_loads[copy_id]
        load, at = found
        block = load.blocks[at]
        block.open -= 1
        block.is_good = block.is_good and is_good
        self._advance(load, on_settled)
        if load.is_over:
            self._open.remove(load)

    def _advance(self, load: PrefixLoad, on_settled: OnSettled) -> None:
        """Process the finished blocks of a load, in order."""
        while not load.is_over and not load.blocks[load.settled].open:
            at = load.settled
            load.settled += 1
            on_settled(load, at, self._enter(load, load.blocks[at], load.tree_keys[at]))

    def held(self, group: int) -> list[PageId]:
        """Pages whose copies have not settled."""
        return [
            page
            for load in self._open
            for u in load.blocks[load.settled :]
            for page in u.pages[group]
        ]

    def _enter(self, load: PrefixLoad, block: LoadingBlock, tree_key: bytes) -> Node | None:
        """Turn a block into a node; None if the tree has one already, or the block is of no use."""
        is_lost = load.parent is not None and not load.parent.is_attached
        load.is_broken = load.is_broken or not block.is_good or is_lost
        if load.is_broken:
            for g, pages in enumerate(block.pages):
                self.pools[g].release(pages, NEVER_USED)
            return None
        node, is_new = self.cached.tree.insert(load.namespace, load.parent, tree_key)
        load.parent = node
        load.arrived += 1
        for g, pages in enumerate(block.pages):
            if not pages:
                continue
            if node.pages[g]:  # a request has computed it meanwhile
                self.pools[g].release(pages, NEVER_USED)
            else:
                self.cached.attach(node, g, pages, NEVER_USED)
        return node if is_new else None

    def _make_free_outside(self, path: Sequence[Node], wanted: list[int]) -> bool:
        """`make_free` without evicting the nodes of `path`."""
        groups = range(len(self.pools))
        for node in path:
            self.cached.touch(node, node.priority)
            for g in groups:
                self.cached.lock(node, g)
        has_capacity = self.make_free(wanted)
        for node in reversed(path):
            for g in groups:
                self.cached.unlock(node, g, node.epochs[g])
        return has_capacity
