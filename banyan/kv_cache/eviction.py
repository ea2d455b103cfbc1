"""Eviction policies: a key function each; the node with the smallest key goes first.

Some policies take further numbers (config/eviction.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

from banyan.base.table import Table
from banyan.kv_cache.radix_tree import Node

EvictionKey = Callable[[Node], tuple[int, ...]]


lru: EvictionKey = attrgetter("last_used", "born")
"""Least recently used. No two uses are equal; the second number only makes it a tuple."""


def mru(node: Node) -> tuple[int, ...]:
    """Most recently used."""
    return (-node.last_used,)


def lfu(node: Node) -> tuple[int, ...]:
    """Least often hit, the least recently used among equals."""
    return (node.hits, node.last_used)


def slru(node: Node, protected_threshold: int = 2) -> tuple[int, ...]:
    """Nodes with fewer hits than the threshold first; the least recently used among equals."""
    return (int(node.hits >= protected_threshold), node.last_used)


def tlru(node: Node, threshold: int, next_prompt_estimate: int) -> tuple[int, ...]:
    """Ends of branches that the next turn can spare first; then least recently used.

    A branch end is spare if a next prompt of `next_prompt_estimate` tokens would still leave at
    most `threshold` tokens to compute without it (arXiv 2510.15152). The length of a branch
    includes removed blocks, so the rest of it stays.
    """
    assert node.parent is not None
    lost = node.history - node.parent.end
    is_spare = not node.children and lost <= threshold - next_prompt_estimate
    return (int(not is_spare), node.last_used)


def fifo(node: Node) -> tuple[int, ...]:
    """Oldest insertion."""
    return (node.born,)


def filo(node: Node) -> tuple[int, ...]:
    """Newest insertion."""
    return (-node.born,)


def priority(node: Node) -> tuple[int, ...]:
    """Lowest request priority, the least recently used among equals."""
    return (node.priority, node.last_used)


EVICTION: Table[Callable[..., tuple[int, ...]]] = Table(
    "eviction policy",
    {
        name: f"banyan.kv_cache.eviction:{name}"
        for name in ("lru", "lfu", "slru", "tlru", "priority", "fifo", "filo", "mru")
    },
)


def eviction_key(name: str, numbers: Mapping[str, int]) -> EvictionKey:
    """The sort key of a policy with these numbers; ConfigError for an unknown policy."""
    return partial(EVICTION.load(name), **numbers)
