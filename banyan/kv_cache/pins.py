"""Pins: prefixes whose pages stay cached until a time, or until they are unpinned.

A pin locks the nodes of its prefix, as a running request does, so they are not evicted. Pins may
use a bounded share of each pool. They are dropped when a request could not run at all otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.kv_cache.page_pool import EpochTracker, PagePool
from banyan.kv_cache.radix_tree import CachedPages, Node
from banyan.kv_cache.sizing import STATE, WINDOW, CacheGroup

_SHARE = 4
"""At most 1 / this of a pool is pinned."""
MOST_PINS = 256


@dataclass
class Pin:
    name: str
    tokens: int
    until_s: float
    nodes: list[list[Node]]
    """Per group, the nodes that it locks."""
    priority: int = 0
    """The lowest is dropped first; among equals the one that expires first."""

    @property
    def num_pages(self) -> int:
        return sum(len(node.pages[g]) for g, nodes in enumerate(self.nodes) for node in nodes)


class Pins:
    """
    Args:
        gets_state: whether a state checkpoint at the end of this block is under way.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        pools: Sequence[PagePool],
        cached: CachedPages,
        epochs: EpochTracker,
        gets_state: Callable[[Node], bool],
    ) -> None:
        self._groups, self._block_size, self._pools = groups, block_size, pools
        self._cached, self._epochs = cached, epochs
        self._gets_state = gets_state
        self.by_name: dict[str, Pin] = {}

    @property
    def pages(self) -> int:
        """Pinned pages, all groups."""
        return sum(len(node.pages[g]) for g in range(len(self._groups)) for node in self._pinned(g))

    def add(self, name: str, path: Sequence[Node], until_s: float, priority: int = 0) -> str:
        """Pin a prefix. Returns "" or the reason why it cannot be pinned.

        Args:
            path: its whole blocks, which the caller has locked.
        """
        if not path or not all(node.is_attached for node in path):
            return f"has no whole page of {self._block_size} tokens in the prefix cache"
        blocks = self._usable(path)
        if not blocks:
            return "has no state in the prefix cache to go on with"
        path = path[:blocks]
        if len(self.by_name) >= MOST_PINS:
            return f"cannot be pinned: {MOST_PINS} prefixes are"
        nodes = [
            list(path[group.first_needed(self._block_size, blocks) :]) for group in self._groups
        ]
        if any(
            group.kind == WINDOW and not all(node.pages[g] for node in nodes[g])
            for g, group in enumerate(self._groups)
        ):
            return "cannot be pinned: layers with a window have let its last pages go"
        for g, pool in enumerate(self._pools):
            wanted, most = self._most(g, nodes[g]), pool.total // _SHARE
            if wanted > most:
                return f"cannot be pinned: {wanted} pages would be, and {most} may"
        self.remove(name)
        self.by_name[name] = Pin(name, blocks * self._block_size, until_s, nodes, priority)
        for g, mine in enumerate(nodes):
            for node in mine:
                self._cached.lock(node, g)
        return ""

    def remove(self, name: str) -> bool:
        """Drop a pin; False if there is none of this name."""
        pin = self.by_name.pop(name, None)
        if pin is None:
            return False
        epoch = self._epochs.now()
        for g, nodes in enumerate(pin.nodes):
            for node in reversed(nodes):
                self._cached.unlock(node, g, epoch)
        return True

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over."""
        for name in [pin.name for pin in self.by_name.values() if pin.until_s <= now]:
            self.remove(name)

    def evict_one(self) -> bool:
        """Drop the pin of lowest priority so that a request can run; False without pins."""
        order = sorted(self.by_name.values(), key=lambda pin: (pin.priority, pin.until_s))
        first = order[0] if order else None
        return first is not None and self.remove(first.name)

    def unpin(self, name: str = "") -> None:
        """Drop the pin of this name, if there is one; "" = all pins."""
        for each in [name] if name else list(self.by_name):
            self.remove(each)

    def alive(self, now: float) -> list[Pin]:
        """Pins whose time is not over."""
        return [pin for pin in self.by_name.values() if pin.until_s > now]

    def _usable(self, path: Sequence[Node]) -> int:
        """Blocks up to the last one with a state; all of them where nothing keeps states."""
        states = [g for g, group in enumerate(self._groups) if group.kind == STATE]
        for blocks in range(len(path), 0, -1):
            end = path[blocks - 1]
            if all(end.pages[g] for g in states) or self._gets_state(end):
                return blocks
        return 0

    def _most(self, group: int, more: Sequence[Node]) -> int:
        """Pages of a group in all pins and these further nodes; a state may be under way yet."""
        geometry = self._groups[group]
        each = 1 if geometry.kind == STATE else self._block_size // geometry.page_tokens
        return each * len(self._pinned(group) | dict.fromkeys(more))

    def _pinned(self, group: int) -> dict[Node, None]:
        found: dict[Node, None] = {}
        for pin in self.by_name.values():
            found |= dict.fromkeys(pin.nodes[group])
        return found
