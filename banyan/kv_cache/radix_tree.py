"""RadixTree: the cached prefixes, one node per block of tokens. CachedPages: the pages of nodes.
Match and Lease: a prefix that was found, and the pages that a running request holds.

Keys are opaque bytes: the int32 token ids of a block, or salted hashes in a replayed trace. Keys
are compared whole, so a hash collision cannot reach another tenant's pages. The first level is the
namespace (tenant, adapter, version of the weights; rule R8).

A node holds, per group, the pages of its block and the number of locks on them. Pages without a
lock may be evicted. A running request locks every node that it reads, from the root down, so all
nodes below an unlocked node are unlocked.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from banyan.base.ids import NO_STEP, PageId, SlotId
from banyan.kv_cache.page_pool import NEVER_USED, Epoch
from banyan.kv_cache.sizing import FULL, STATE, CacheGroup


class Node:
    """One block of tokens after a prefix."""

    __slots__ = (
        "born",
        "children",
        "end",
        "history",
        "hits",
        "is_stored",
        "is_tail",
        "key",
        "key_hash",
        "last_used",
        "locks",
        "order",
        "pages",
        "parent",
        "place",
        "priority",
        "promised",
        "epochs",
        "writer",
    )

    def __init__(self, key: bytes, parent: "Node | None", num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.pages: list[list[PageId]] = [[] for _ in range(num_groups)]
        self.locks = [0] * num_groups
        self.epochs: list[Epoch] = [NEVER_USED] * num_groups
        """Per group, the epoch in which the last lock was dropped."""
        self.promised = NO_STEP
        """Step that writes the pages; NO_STEP once it is complete (rule R2)."""
        self.writer = ""
        """Request whose row writes the pages, while promised."""
        self.born = self.last_used = self.hits = self.priority = 0
        self.end = self.history = 0
        """`end`: tokens of the prefix up to this block. `history`: the same for the longest removed
        branch below it. Blocks count as whole."""
        self.is_tail = False
        """A request ended within the block: a short key (kv_cache/partial_blocks.py)."""
        self.order: list[bytes] | None = None
        """Sorted keys of `children`; built at the first call of `neighbours`."""
        self.is_stored = False
        """The pages are in the store or being written (kv_cache/hierarchical_cache.py)."""
        self.place = b""
        """Its name in kv_cache/misses.py; computed on demand."""
        self.key_hash = b""
        """Its key in the store; computed on demand."""

    @property
    def is_attached(self) -> bool:
        return self.parent is not None


class RadixTree:
    """The nodes by namespace and keys. `CachedPages` has their pages.

    Args:
        num_groups: number of cache groups.
        on_removed: called with a node that has left the tree.
        block_size: tokens per node.
    """

    def __init__(
        self,
        num_groups: int,
        on_removed: Callable[[Node], None] = lambda node: None,
        block_size: int = 1,
    ) -> None:
        self._num_groups = num_groups
        self._on_removed = on_removed
        self._block_size = block_size
        self._root = Node(b"", None, num_groups)
        self._ticks = 0
        self.num_nodes = 0

    def tick(self) -> int:
        """A number larger than all before, for orders of use and of insertion."""
        self._ticks += 1
        return self._ticks

    def walk(self, namespace: bytes, keys: Iterator[bytes]) -> Iterator[Node]:
        """The nodes along `keys`, as far as they are cached. Changes nothing."""
        node = self._root.children.get(namespace)
        if node is None:
            return
        for key in keys:
            node = node.children.get(key)
            if node is None:
                return
            yield node

    def insert(self, namespace: bytes, parent: Node | None, key: bytes) -> tuple[Node, bool]:
        """The child of `parent` (None = the namespace) with this key, and whether it is new."""
        if parent is None:
            parent = self._root.children.get(namespace)
            if parent is None:
                parent = Node(namespace, self._root, self._num_groups)
                self._root.children[namespace] = parent
        assert parent.is_attached
        found = parent.children.get(key)
        if found is not None:
            return found, False
        node = Node(key, parent, self._num_groups)
        node.born = node.last_used = self.tick()
        node.end = node.history = parent.end + self._block_size
        parent.children[key] = node
        if parent.order is not None:
            insort(parent.order, key)
        self.num_nodes += 1
        return node, True

    def top(self, namespace: bytes) -> Node | None:
        """The node of a namespace, the parent of its first blocks."""
        return self._root.children.get(namespace)

    def neighbours(self, parent: Node, key: bytes) -> tuple[Node | None, Node | None, Node | None]:
        """(child before `key`, child with `key`, child after `key`) in key order."""
        if parent.order is None:
            parent.order = sorted(parent.children)
        order, at = parent.order, bisect_left(parent.order, key)
        after = at + (key in parent.children)
        return (
            parent.children[order[at - 1]] if at else None,
            parent.children.get(key),
            parent.children[order[after]] if after < len(order) else None,
        )

    def nodes(self) -> Iterator[Node]:
        """Every node except namespaces."""
        stack = [n for top in self._root.children.values() for n in top.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def detach(self, node: Node) -> Node | None:
        """Take a node without children out of the tree; returns its parent if that has no children
        any more."""
        parent = node.parent
        assert parent is not None and not node.children
        self._cut(node, parent)
        if parent.children or parent is self._root:
            return None
        if parent.parent is self._root:
            del self._root.children[parent.key]
            parent.parent = None
            return None
        return parent

    def detach_all(self, members: list[Node]) -> Node | None:
        """As `detach`, for a node and all nodes below it."""
        node, *below = members
        for member in members:
            member.children.clear()
            member.order = None
        leaf = self.detach(node)
        for member in below:
            member.parent = None
            self._on_removed(member)
        self.num_nodes -= len(below)
        return leaf

    def _cut(self, node: Node, parent: Node) -> None:
        del parent.children[node.key]
        if parent.order is not None:
            del parent.order[bisect_left(parent.order, node.key)]
        parent.history = max(parent.history, node.history)
        node.parent = None
        self._on_removed(node)
        self.num_nodes -= 1


class CachedPages:
    """The pages of a tree's nodes: locks, uses, and which pages may be evicted.

    Args:
        groups: cache groups in plan order.
        eviction_key: see kv_cache/eviction.py.
        give_back: called with (group, pages, epoch) when the tree releases pages.
        on_evict: called with a node before its pages are evicted.
    """

    def __init__(
        self,
        tree: RadixTree,
        groups: tuple[CacheGroup, ...],
        eviction_key: Callable[[Node], tuple[int, ...]],
        give_back: Callable[[int, list[PageId], Epoch], None],
        on_evict: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self.tree = tree
        self._groups = groups
        self._key_of = eviction_key
        self._give_back = give_back
        self._on_evict = on_evict
        self._heaps: list[list[tuple[tuple[int, ...], int, Node]]] = [[] for _ in groups]
        self.has_only_states = all(group.kind == STATE for group in groups)
        """Then nodes of a running request may have no pages."""
        self.evictable = [0] * len(groups)
        """Per group, pages without a lock."""
        self.counts = [0] * len(groups)
        """Per group, pages that the tree owns."""
        self.evicted = 0
        """Pages evicted since the start, all groups."""

    def attach(self, node: Node, group: int, pages: list[PageId], epoch: Epoch) -> None:
        """Give the node its pages of `group`; the tree owns them now."""
        assert node.is_attached and not node.pages[group]
        node.pages[group] = pages
        node.epochs[group] = epoch
        self.counts[group] += len(pages)
        if not node.locks[group]:
            self.evictable[group] += len(pages)
            self._offer(node, group)

    def lock(self, node: Node, group: int) -> None:
        """Forbid eviction of the node's pages in `group`."""
        if not node.locks[group]:
            self.evictable[group] -= len(node.pages[group])
        node.locks[group] += 1

    def unlock(self, node: Node, group: int, epoch: Epoch) -> None:
        """Undo one lock. `epoch`: steps and copies that may still read the pages."""
        assert node.locks[group] > 0
        node.locks[group] -= 1
        if node.locks[group]:
            return
        node.epochs[group] = epoch
        if node.is_attached:
            self.evictable[group] += len(node.pages[group])
            for each in range(len(self._groups)):
                self._offer(node, each)

    def touch(self, node: Node, priority: int) -> None:
        """Record a use by a request."""
        before = self._key_of(node)
        node.last_used = self.tree.tick()
        node.hits += 1
        node.priority = max(node.priority, priority)
        if self._key_of(node) < before:  # `evict` handles keys that have grown
            for group in range(len(self._groups)):
                self._offer(node, group)

    def evict(self, group: int, count: int) -> None:
        """Evict at least `count` pages of `group`, or all unlocked ones."""
        target = self.evicted + count
        heap = self._heaps[group]
        while heap and self.evicted < target:
            key, _, node = heappop(heap)
            if not self._may_go(node, group):
                continue
            if key != self._key_of(node):
                self._offer(node, group)
                continue
            self.evicted += len(node.pages[group])
            self._on_evict(node)
            self.drop_pages(node, group)

    def drop_pages(self, node: Node, group: int) -> None:
        """Release the node's pages of `group`; an unused node leaves the tree."""
        if self._groups[group].kind == FULL:
            self.remove(node)
            return
        self._release(node, group)
        self.trim(node)

    def trim(self, node: Node) -> None:
        """Remove a node without pages, locks and children, and its ancestors that become so."""
        while node.parent is not None and not node.children and not any(node.pages):
            if any(node.locks):
                return
            parent = node.parent
            self._offer_leaf(self.tree.detach(node))
            node = parent

    def drop_copy(self, node: Node, group: int) -> None:
        """Release the node's pages of `group`; the caller attaches others with the same content."""
        assert not node.locks[group]
        self._release(node, group)

    def drop_subtree(self, node: Node, epoch: Epoch) -> None:
        """Take the node and its subtree out of the tree, even if locked.

        For pages with wrong content. Holders of locks find their nodes detached.
        """
        dropped = [node]
        for member in dropped:
            dropped.extend(member.children.values())
        for member in dropped:
            for group in range(len(self._groups)):
                member.epochs[group] = epoch
                self._release(member, group)
        self._offer_leaf(self.tree.detach_all(dropped))

    def remove(self, node: Node) -> None:
        """Take a node without children and locks out of the tree."""
        assert not node.children and not any(node.locks)
        for group in range(len(self._groups)):
            self._release(node, group)
        self._offer_leaf(self.tree.detach(node))

    def clear(self) -> None:
        """Evict everything that is not locked."""
        for group in range(len(self._groups)):
            self.evict(group, self.evictable[group])

    def check(self) -> None:
        """Raise AssertionError when a count disagrees with the nodes."""
        cached = [0] * len(self._groups)
        evictable = [0] * len(self._groups)
        for node in self.tree.nodes():
            for group, pages in enumerate(node.pages):
                cached[group] += len(pages)
                evictable[group] += 0 if node.locks[group] else len(pages)
            is_used = any(node.pages) or node.children or any(node.locks)
            assert is_used or self.has_only_states, "an unused node"
        assert self.tree.num_nodes == sum(1 for _ in self.tree.nodes())
        assert cached == self.counts, f"cached {self.counts}, counted {cached}"
        assert evictable == self.evictable, f"evictable {self.evictable}, counted {evictable}"

    def _may_go(self, node: Node, group: int) -> bool:
        if not node.is_attached or node.locks[group] or not node.pages[group]:
            return False
        if self._groups[group].kind != FULL:
            return True
        return not node.children and not any(node.locks)  # the node goes as a whole

    def _offer(self, node: Node, group: int) -> None:
        if not self._may_go(node, group):
            return
        heap = self._heaps[group]
        if len(heap) > 2 * self.tree.num_nodes + 64:  # entries of nodes used again since are stale
            idle = [n for n in self.tree.nodes() if self._may_go(n, group)]
            heap[:] = [(self._key_of(n), self.tree.tick(), n) for n in idle]
            heapify(heap)
            return
        heappush(heap, (self._key_of(node), self.tree.tick(), node))

    def _release(self, node: Node, group: int) -> None:
        pages = node.pages[group]
        if not pages:
            return
        node.pages[group] = []
        self.counts[group] -= len(pages)
        if not node.locks[group]:
            self.evictable[group] -= len(pages)
        self._give_back(group, pages, node.epochs[group])

    def _offer_leaf(self, node: Node | None) -> None:
        """A node that has lost its last child may be evicted now."""
        if node is None:
            return
        for group in range(len(self._groups)):
            self._offer(node, group)


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
