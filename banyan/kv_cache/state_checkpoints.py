"""StateCheckpoints: copies recurrent states into the tree and back out of it.

A STATE page changes with every row, so it cannot be shared in place. A checkpoint copies it to a
page of the tree after a row that ends at a known position. A restore copies it back before the
first row of a request with that prefix. The runner reports the end of both, perhaps steps later.
"""

from dataclasses import dataclass, replace

from banyan.base.ids import PageId, StepId
from banyan.kv_cache.page_pool import EpochTracker, PagePool
from banyan.kv_cache.radix_tree import CachedPages, Lease, Node
from banyan.kv_cache.sizing import STATE, CacheGroup
from banyan.messages.plan import PageCopy, device_page

_VOID = "\0void"
"""Writer of a checkpoint with wrong content. No request can have this id."""


@dataclass(frozen=True)
class _OpenCopy:
    """`node`: source of a restore or target of a checkpoint; `page`: the page of the tree."""

    group: int
    node: Node
    page: PageId
    is_checkpoint: bool
    step: StepId
    writer: str


class StateCheckpoints:
    """The state copies in flight, and the pages that checkpoints under way hold.

    Args:
        is_on: False = prefixes are not shared, so states are not kept.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        block_size: int,
        pools: list[PagePool],
        cached: CachedPages,
        epochs: EpochTracker,
        is_on: bool = True,
    ) -> None:
        self.state_groups = [g for g, group in enumerate(groups) if group.kind == STATE]
        self._block_size = block_size
        self._pools = pools
        self._cached = cached
        self._epochs = epochs
        self._is_on = is_on and bool(self.state_groups)
        self._open: dict[int, _OpenCopy] = {}

    def boundary(self, lease: Lease, known: int, start: int) -> int:
        """Position where a row after `start` should end so that its state can be kept; 0 =
        anywhere.

        This is the end of the last whole block. Before that, it is the position where the sequence
        leaves a prefix that other requests computed: the next request with that prefix then finds
        a state.
        """
        if not self._is_on:
            return 0
        end = lease.fork if lease.fork > start else known // self._block_size * self._block_size
        return end if end > start else 0

    def checkpoint(
        self, lease: Lease, end: int, row: int, step: StepId, writer: str
    ) -> list[PageCopy]:
        """Copies that keep the states of a prefix of `end` published tokens, if pages are free."""
        if end != len(lease.path) * self._block_size or not lease.path[-1].is_attached:
            return []
        copies = [
            self._checkpoint(lease.path[-1], g, lease.tables[g][0], row, step, writer)
            for g in self.state_groups
        ]
        return [copy for copy in copies if copy is not None]

    def restores(self, lease: Lease, row: int, step: StepId) -> list[PageCopy]:
        """Copies of the matched states into the lease's own pages. Their ends drop its locks."""
        last = len(lease.path) - 1
        return [
            self._restore(lease.locked[g].pop(last), g, lease.tables[g][0], row, step)
            for g in (self.state_groups if lease.path else ())
        ]

    def _restore(self, node: Node, group: int, live: PageId, row: int, step: StepId) -> PageCopy:
        copy_id = self._add(_OpenCopy(group, node, node.pages[group][0], False, step, ""))
        source = device_page(node.pages[group][0])
        return PageCopy(copy_id, group, source, device_page(live), "before", row)

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended. A state whose restore failed is dropped."""
        for copy_id in (*ids, *failed):
            copy = self._open.pop(copy_id, None)
            if copy is None:
                continue
            del self._epochs.open_copies[copy_id]
            if copy.is_checkpoint:
                self._end_checkpoint(copy, is_good=copy_id not in failed)
                continue
            node, group = copy.node, copy.group
            self._cached.unlock(node, group, self._epochs.now())
            if copy_id in failed and node.is_attached and not node.locks[group]:
                self._cached.drop_pages(node, group)

    def void(self, step: StepId, writer: str) -> None:
        """Discard the checkpoints of steps ≥ `step` (of one writer, or of all)."""
        for copy_id, copy in self._open.items():
            if copy.is_checkpoint and copy.step >= step and writer in ("", copy.writer):
                self._open[copy_id] = replace(copy, writer=_VOID)

    def is_target(self, node: Node) -> bool:
        """Whether a checkpoint for the node is under way."""
        return any(copy.is_checkpoint and copy.node is node for copy in self._open.values())

    def held(self, group: int) -> list[PageId]:
        """Pages of checkpoints under way."""
        return [c.page for c in self._open.values() if c.is_checkpoint and c.group == group]

    def _checkpoint(
        self, node: Node, group: int, live: PageId, row: int, step: StepId, writer: str
    ) -> PageCopy | None:
        """Copy a live page for the node; None if it has a state, or no page is free."""
        pool = self._pools[group]
        if node.pages[group] or any(
            c.node is node and c.group == group and c.is_checkpoint for c in self._open.values()
        ):
            return None
        if not pool.free:
            self._cached.evict(group, 1)
        if not pool.free:
            return None
        (page,) = pool.take(1)
        copy_id = self._add(_OpenCopy(group, node, page, True, step, writer))
        return PageCopy(copy_id, group, device_page(live), device_page(page), "after", row)

    def _add(self, copy: _OpenCopy) -> int:
        copy_id = self._epochs.open_copy()
        self._open[copy_id] = copy
        return copy_id

    def _end_checkpoint(self, copy: _OpenCopy, is_good: bool) -> None:
        is_wanted = copy.node.is_attached and not copy.node.pages[copy.group]
        if is_good and is_wanted and copy.writer != _VOID:
            self._cached.attach(copy.node, copy.group, [copy.page], self._epochs.now())
        else:
            self._pools[copy.group].release([copy.page], self._epochs.now())
            if copy.node.is_attached and self._cached.has_only_states:
                self._cached.trim(copy.node)
