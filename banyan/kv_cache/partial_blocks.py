"""PartialBlocks: prefixes that end within a block.

A page has one writer. So a request that shares only the first tokens of a block gets a copy of the
block's pages before the step that continues after them. The source is any block of the tree that
begins alike, or a tail: the tokens of a finished request after its last whole block. A tail is a
node without children. Walks along whole blocks never meet it, and it is never stored or sent.

The source is locked until the copy has ended, so its pages are not reused before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from banyan.base.ids import NO_STEP
from banyan.kv_cache.page_pool import EpochTracker
from banyan.kv_cache.radix_tree import CachedPages, Lease, Node, PartialMatch
from banyan.kv_cache.sizing import STATE, CacheGroup
from banyan.messages.plan import PageCopy, device_page

_TOKEN_BYTES = 4
_MOST_MOVED = 128
"""Most positions to copy per position saved: copying K and V of this many positions takes no longer
than computing one."""


@dataclass
class _Open:
    """A copy of a block under way."""

    node: Node
    left: int
    """Pages whose copies have not ended."""


class PartialBlocks:
    """
    Args:
        held: per group, private pages of all leases; pages of a kept tail are subtracted.
        is_on: False = only whole blocks are shared, or nothing.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        cached: CachedPages,
        epochs: EpochTracker,
        held: list[int],
        is_on: bool,
    ) -> None:
        self._groups = groups
        self._block_size = block_size
        self._cached = cached
        self._epochs = epochs
        self._held = held
        self._is_on = is_on and block_size > 1 and all(group.kind != STATE for group in groups)
        self._open: dict[int, _Open] = {}

    def find(
        self, namespace: bytes, path: Sequence[Node], tokens: bytes | bytearray, limit: int
    ) -> PartialMatch | None:
        """The block after `path`, a match of this namespace, that begins with most of the tokens up
        to `limit`; None where none is worth a copy. Changes nothing."""
        first = len(path) * self._block_size
        wanted = bytes(
            tokens[first * _TOKEN_BYTES : min(limit, first + self._block_size) * _TOKEN_BYTES]
        )
        least = -(-self._block_size // _MOST_MOVED)
        if not self._is_on or len(wanted) < least * _TOKEN_BYTES:
            return None
        parent = path[-1] if path else self._cached.tree.top(namespace)
        best = None if parent is None else self._closest(parent, wanted)
        return best if best is not None and best.tokens >= least else None

    def lock(self, lease: Lease, partial: PartialMatch) -> None:
        """The lease will begin with a copy of this block."""
        lease.partial = partial
        for g in range(len(self._groups)):
            self._cached.lock(partial.node, g)

    def unlock(self, lease: Lease) -> None:
        """The lease ends; drop the lock if its copy has not begun."""
        if lease.partial is not None:
            self._unlock_node(lease.partial.node)
            lease.partial = None

    def begin(self, lease: Lease, row: int) -> list[PageCopy]:
        """The copies into the granted pages after the lease's path."""
        partial, lease.partial = lease.partial, None
        if partial is None:
            return []
        copies: list[PageCopy] = []
        for g, group in enumerate(self._groups):
            first = len(lease.path) * self._block_size // group.page_tokens
            for at, page in enumerate(partial.node.pages[g][: group.pages_for(partial.tokens)]):
                ends = device_page(page), device_page(lease.tables[g][first + at])
                copies.append(PageCopy(self._epochs.open_copy(), g, *ends, "before", row))
        self._open |= dict.fromkeys((copy.id for copy in copies), _Open(partial.node, len(copies)))
        return copies

    def end(self, ids: Iterable[int]) -> None:
        """Copies have ended. Ids of other owners are ignored."""
        for copy_id in ids:
            copy = self._open.pop(copy_id, None)
            if copy is None:
                continue
            del self._epochs.open_copies[copy_id]
            copy.left -= 1
            if not copy.left:
                self._unlock_node(copy.node)
                self._drop_if_longer(copy.node)

    def keep(self, lease: Lease, tokens: bytes | bytearray, written: int) -> None:
        """Move the tokens after the last whole block of an ending lease into the tree, as a tail.

        Args:
            written: positions, from the first one, that complete steps have written.
        """
        depth, parent = len(lease.path), lease.path[-1] if lease.path else None
        count = written - depth * self._block_size
        is_lost = parent is not None and not parent.is_attached
        if not self._is_on or not 0 < count < self._block_size or is_lost:
            return
        places = [
            range(
                first := depth * self._block_size // group.page_tokens,
                first + group.pages_for(count),
            )
            for group in self._groups
        ]
        if not all(i in lease.private[g] for g, of in enumerate(places) for i in of):
            return
        key = bytes(tokens[depth * self._block_size * _TOKEN_BYTES : written * _TOKEN_BYTES])
        node, is_new = self._cached.tree.insert(lease.namespace, parent, key)
        if not is_new:
            return
        node.is_tail, node.priority = True, lease.priority
        for g, indices in enumerate(places):
            pages = [lease.private[g].pop(i) for i in indices]
            self._held[g] -= len(pages)
            self._cached.attach(node, g, pages, self._epochs.now())
        before = (
            self._cached.tree.neighbours(node.parent, key)[0] if node.parent is not None else None
        )
        if before is not None:
            self._drop_if_longer(before)
        self._drop_if_longer(node)

    # -- details ------------------------------------------------------------------------------

    def _closest(self, parent: Node, wanted: bytes) -> PartialMatch | None:
        """The child that shares most tokens with `wanted`: a neighbour in key order."""
        best: PartialMatch | None = None
        for node in self._cached.tree.neighbours(parent, wanted):
            if node is None or node.promised != NO_STEP or not all(node.pages):
                continue
            shared = shared_tokens(node.key, wanted)
            if shared and (best is None or shared > best.tokens):
                best = PartialMatch(node, shared)
        return best

    def _drop_if_longer(self, tail: Node) -> None:
        """Remove a tail if another block holds all its tokens and more."""
        if not tail.is_tail or tail.parent is None or any(tail.locks):
            return
        _, _, after = self._cached.tree.neighbours(tail.parent, tail.key)
        if after is not None and after.key.startswith(tail.key) and all(after.pages):
            self._cached.remove(tail)

    def _unlock_node(self, node: Node) -> None:
        for g in range(len(self._groups)):
            self._cached.unlock(node, g, self._epochs.now())


def shared_tokens(one: bytes, other: bytes) -> int:
    """Number of equal tokens at the start."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[: middle * _TOKEN_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low
