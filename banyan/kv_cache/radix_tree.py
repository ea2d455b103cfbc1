"""RadixTree: which prefixes are in the cache, one node per unit of tokens.

Keys are opaque bytes: a live key is the int32 token ids of a unit, a replayed trace may use
salted hashes. Keys are compared whole, so a crafted collision cannot reach another's pages. The
first level of the tree is the namespace (tenant, adapter, weight version; rule R8).

A node holds, per group, the pages of its unit and the number of locks on them. Pages without a
lock may be evicted. A running request locks every node that it reads, from the root down, so the
nodes under a lock-free node are lock-free as well.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from banyan.base.ids import NO_STEP, PageId
from banyan.kv_cache.epochs import NEVER_USED, Epoch
from banyan.kv_cache.groups import FULL, STATE, CacheGroup


class Node:
    """One unit of tokens below a prefix."""

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
        """Per group, what was in flight when the last lock went."""
        self.promised = NO_STEP
        """Step that writes the pages, NO_STEP once it is complete (rule R2)."""
        self.writer = ""
        """Request whose row writes the pages, while promised."""
        self.born = self.last_used = self.hits = self.priority = 0
        self.end = self.history = 0
        """Tokens of the prefix with this unit, and of the longest that ever went on from here and
        is gone; a unit counts as whole."""
        self.is_tail = False
        """A request ended within the unit: the key is shorter than others
        (kv_cache/partial_blocks.py)."""
        self.order: list[bytes] | None = None
        """The keys of `children`, sorted; None while nobody has asked for neighbours."""
        self.is_stored = False
        """The pages are in the store, or on their way there (kv_cache/hierarchical_cache.py)."""
        self.place = b""
        """What kv_cache/misses.py knows it by; b"" while nobody has asked."""
        self.key_hash = b""
        """What the store calls them; b"" while nobody has asked."""

    @property
    def is_attached(self) -> bool:
        return self.parent is not None


class RadixTree:
    """The tree, its locks, and what may be evicted.

    Args:
        groups: cache groups in plan order.
        eviction_key: see kv_cache/eviction.py.
        unit: tokens of a node.
        give_back: called with (group, pages, stamp) when the tree lets pages go.
        leaving: called with a node before its pages are evicted, while all of them are there.
        gone: called with a node that has left the tree.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        eviction_key: Callable[[Node], tuple[int, ...]],
        give_back: Callable[[int, list[PageId], Epoch], None],
        leaving: Callable[[Node], None] = lambda node: None,
        gone: Callable[[Node], None] = lambda node: None,
        block_size: int = 1,
    ) -> None:
        self._groups = groups
        self._key_of = eviction_key
        self._give_back = give_back
        self._leaving = leaving
        self._gone = gone
        self._block_size = block_size
        self._root = Node(b"", None, len(groups))
        self._heaps: list[list[tuple[tuple[int, ...], int, Node]]] = [[] for _ in groups]
        self._ticks = 0
        self.num_nodes = 0
        self.evictable = [0] * len(groups)
        """Per group, pages without a lock."""
        self.cached = [0] * len(groups)
        """Per group, pages that the tree owns."""
        self.evicted = 0
        """Pages evicted since the start, all groups."""

    def walk(self, namespace: bytes, keys: Iterator[bytes]) -> Iterator[Node]:
        """The nodes along `keys`, as far as the tree goes. Changes nothing."""
        node = self._root.children.get(namespace)
        if node is None:
            return
        for key in keys:
            node = node.children.get(key)
            if node is None:
                return
            yield node

    @property
    def has_states_alone(self) -> bool:
        """No group has pages of every node, so a running request may have nodes with none."""
        return all(group.kind == STATE for group in self._groups)

    def insert(self, namespace: bytes, parent: Node | None, key: bytes) -> tuple[Node, bool]:
        """The child of `parent` (None = the namespace) with this key, and whether it is new."""
        if parent is None:
            parent = self._root.children.get(namespace)
            if parent is None:
                parent = Node(namespace, self._root, len(self._groups))
                self._root.children[namespace] = parent
        assert parent.is_attached
        found = parent.children.get(key)
        if found is not None:
            return found, False
        node = Node(key, parent, len(self._groups))
        node.born = node.last_used = self._tick()
        node.end = node.history = parent.end + self._block_size
        parent.children[key] = node
        if parent.order is not None:
            insort(parent.order, key)
        self.num_nodes += 1
        return node, True

    def top(self, namespace: bytes) -> Node | None:
        """The node of a namespace, above its first units."""
        return self._root.children.get(namespace)

    def neighbours(self, parent: Node, key: bytes) -> tuple[Node | None, Node | None, Node | None]:
        """Children of `parent` in the order of their keys: the one before `key`, the one that has
        it, the one behind it."""
        if parent.order is None:
            parent.order = sorted(parent.children)
        order, at = parent.order, bisect_left(parent.order, key)
        behind = at + (key in parent.children)
        return (
            parent.children[order[at - 1]] if at else None,
            parent.children.get(key),
            parent.children[order[behind]] if behind < len(order) else None,
        )

    def remove(self, node: Node) -> None:
        """Take a node without children and locks out of the tree."""
        self._remove(node)

    def attach(self, node: Node, group: int, pages: list[PageId], epoch: Epoch) -> None:
        """The tree takes over `pages` as the node's part in `group`."""
        assert node.is_attached and not node.pages[group]
        node.pages[group] = pages
        node.epochs[group] = epoch
        self.cached[group] += len(pages)
        if not node.locks[group]:
            self.evictable[group] += len(pages)
            self._offer(node, group)

    def lock(self, node: Node, group: int) -> None:
        """Forbid eviction of the node's pages in `group`."""
        if not node.locks[group]:
            self.evictable[group] -= len(node.pages[group])
        node.locks[group] += 1

    def unlock(self, node: Node, group: int, epoch: Epoch) -> None:
        """Undo one lock; `epoch` says what may still be reading."""
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
        """Note a hit."""
        before = self._key_of(node)
        node.last_used = self._tick()
        node.hits += 1
        node.priority = max(node.priority, priority)
        if self._key_of(node) < before:  # heaps find a key that grows by themselves
            for group in range(len(self._groups)):
                self._offer(node, group)

    def evict(self, group: int, count: int) -> None:
        """Let at least `count` pages of `group` go, or all that may go."""
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
            self._leaving(node)
            self.drop_pages(node, group)

    def drop_pages(self, node: Node, group: int) -> None:
        """Let the node's pages in `group` go; a node without any use leaves the tree."""
        if self._groups[group].kind == FULL:
            self._remove(node)
            return
        self._release(node, group)
        self.trim(node)

    def trim(self, node: Node) -> None:
        """Let a node without any use leave the tree, and those above it that had no other."""
        while node.parent is not None and not node.children and not any(node.pages):
            if any(node.locks):
                return
            parent = node.parent
            self._detach(node)
            node = parent

    def replace_pages(self, node: Node, group: int) -> None:
        """Let the node's pages in `group` go to make place for others of the same content."""
        assert not node.locks[group]
        self._release(node, group)

    def drop_subtree(self, node: Node, epoch: Epoch) -> None:
        """Take the node and all below it out of the tree, locked or not.

        For pages whose content is wrong. Whoever holds locks finds its nodes detached.
        """
        dropped = [node]
        for member in dropped:
            dropped.extend(member.children.values())
        for member in dropped:
            for group in range(len(self._groups)):
                member.epochs[group] = epoch
                self._release(member, group)
        self._detach(node)
        for member in dropped:
            member.children.clear()
            member.order = None
            member.parent = None
            self._gone(member)
        self.num_nodes -= len(dropped) - 1

    def nodes(self) -> Iterator[Node]:
        """Every node, namespaces left out."""
        stack = [n for top in self._root.children.values() for n in top.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def clear(self) -> None:
        """Evict everything that is not locked."""
        for group in range(len(self._groups)):
            self.evict(group, self.evictable[group])

    def check(self) -> None:
        """Raise AssertionError when a count disagrees with the nodes."""
        cached = [0] * len(self._groups)
        evictable = [0] * len(self._groups)
        for node in self.nodes():
            for group, pages in enumerate(node.pages):
                cached[group] += len(pages)
                evictable[group] += 0 if node.locks[group] else len(pages)
            is_used = any(node.pages) or node.children or any(node.locks)
            assert is_used or self.has_states_alone, "a node without use"
        assert self.num_nodes == sum(1 for _ in self.nodes())
        assert cached == self.cached, f"cached {self.cached}, counted {cached}"
        assert evictable == self.evictable, f"evictable {self.evictable}, counted {evictable}"

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

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
        if len(heap) > 2 * self.num_nodes + 64:  # entries of nodes used again since are stale
            idle = [n for n in self.nodes() if self._may_go(n, group)]
            heap[:] = [(self._key_of(n), self._tick(), n) for n in idle]
            heapify(heap)
            return
        heappush(heap, (self._key_of(node), self._tick(), node))

    def _release(self, node: Node, group: int) -> None:
        pages = node.pages[group]
        if not pages:
            return
        node.pages[group] = []
        self.cached[group] -= len(pages)
        if not node.locks[group]:
            self.evictable[group] -= len(pages)
        self._give_back(group, pages, node.epochs[group])

    def _remove(self, node: Node) -> None:
        assert not node.children and not any(node.locks)
        for group in range(len(self._groups)):
            self._release(node, group)
        self._detach(node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.order is not None:
            del parent.order[bisect_left(parent.order, node.key)]
        parent.history = max(parent.history, node.history)
        node.parent = None
        self._gone(node)
        self.num_nodes -= 1
        if parent.children or parent is self._root:
            return
        if parent.parent is self._root:
            del self._root.children[parent.key]
            parent.parent = None
            return
        for group in range(len(self._groups)):
            self._offer(parent, group)
