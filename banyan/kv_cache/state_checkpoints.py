"""StateCopies: how a running state gets into the tree, and from there into another request.

A STATE page changes with every row, so it cannot be shared in place. A checkpoint copies it to a
page of the tree after a row that ends at a known position; a restore copies it back before the
first row of a request with that prefix. Both end when the runner says so, perhaps steps later.
"""

from dataclasses import dataclass, replace

from banyan.base.ids import PageId, StepId
from banyan.kv_cache.epochs import EpochTracker
from banyan.kv_cache.groups import STATE, CacheGroup
from banyan.kv_cache.page_pool import PagePool
from banyan.kv_cache.radix_tree import Node, RadixTree
from banyan.messages.plan import PageCopy, device_page

_VOID = "\0void"
"""Writer of a checkpoint whose content proved wrong; no request may bear this name."""


@dataclass(frozen=True)
class _OpenCopy:
    """`node` is the source of a restore, the target of a checkpoint; `page` is the tree's page."""

    group: int
    node: Node
    page: PageId
    is_checkpoint: bool
    step: StepId
    writer: str


class StateCopies:
    """The copies in flight, and the pages that checkpoints under way hold."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        pools: list[PagePool],
        tree: RadixTree,
        epochs: EpochTracker,
    ) -> None:
        self.state_groups = [g for g, group in enumerate(groups) if group.kind == STATE]
        self._pools = pools
        self._tree = tree
        self._epochs = epochs
        self._open: dict[int, _OpenCopy] = {}

    def restore(self, node: Node, group: int, live: PageId, row: int, step: StepId) -> PageCopy:
        """Copy the node's state into a live page; the caller's lock goes when the copy ends."""
        copy_id = self._add(_OpenCopy(group, node, node.pages[group][0], False, step, ""))
        source = device_page(node.pages[group][0])
        return PageCopy(copy_id, group, source, device_page(live), "before", row)

    def checkpoint(
        self, node: Node, group: int, live: PageId, row: int, step: StepId, writer: str
    ) -> PageCopy | None:
        """Copy a live page for the node; None when it has a state, or no page is to be had."""
        pool = self._pools[group]
        if node.pages[group] or any(
            c.node is node and c.group == group and c.is_checkpoint for c in self._open.values()
        ):
            return None
        if not pool.free:
            self._tree.evict(group, 1)
        if not pool.free:
            return None
        (page,) = pool.take(1)
        copy_id = self._add(_OpenCopy(group, node, page, True, step, writer))
        return PageCopy(copy_id, group, device_page(live), device_page(page), "after", row)

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended. A state that could not be read back is not offered again."""
        for copy_id in (*ids, *failed):
            copy = self._open.pop(copy_id, None)
            if copy is None:
                continue
            del self._epochs.open_copies[copy_id]
            if copy.is_checkpoint:
                self._end_checkpoint(copy, is_good=copy_id not in failed)
                continue
            node, group = copy.node, copy.group
            self._tree.unlock(node, group, self._epochs.now())
            if copy_id in failed and node.is_attached and not node.locks[group]:
                self._tree.drop_pages(node, group)

    def void(self, step: StepId, writer: str) -> None:
        """Checkpoints of steps ≥ `step` (of one writer, or of all) hold nothing of worth."""
        for copy_id, copy in self._open.items():
            if copy.is_checkpoint and copy.step >= step and writer in ("", copy.writer):
                self._open[copy_id] = replace(copy, writer=_VOID)

    def is_target(self, node: Node) -> bool:
        """Whether a checkpoint for the node is under way."""
        return any(copy.is_checkpoint and copy.node is node for copy in self._open.values())

    def held(self, group: int) -> list[PageId]:
        """Pages of checkpoints under way."""
        return [c.page for c in self._open.values() if c.is_checkpoint and c.group == group]

    def _add(self, copy: _OpenCopy) -> int:
        copy_id = self._epochs.open_copy()
        self._open[copy_id] = copy
        return copy_id

    def _end_checkpoint(self, copy: _OpenCopy, is_good: bool) -> None:
        is_wanted = copy.node.is_attached and not copy.node.pages[copy.group]
        if is_good and is_wanted and copy.writer != _VOID:
            self._tree.attach(copy.node, copy.group, [copy.page], self._epochs.now())
        else:
            self._pools[copy.group].release([copy.page], self._epochs.now())
            if copy.node.is_attached and self._tree.has_states_alone:
                self._tree.trim(copy.node)
