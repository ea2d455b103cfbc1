"""Eviction policies: a key function each; the node with the smallest key goes first.

What a policy takes besides the node are whole numbers by name (config/eviction.py).
"""

from collections.abc import Callable, Mapping
from functools import partial

from banyan.base.table import Table
from banyan.kv_cache.radix_tree import Node

EvictionKey = Callable[[Node], tuple[int, ...]]


def lru(node: Node) -> tuple[int, ...]:
    """Least recently used."""
    return (node.last_used,)


def mru(node: Node) -> tuple[int, ...]:
    """Most recently used."""
    return (-node.last_used,)


def lfu(node: Node) -> tuple[int, ...]:
    """Least often hit, the least recently used among equals."""
    return (node.hits, node.last_used)


def slru(node: Node, protected_threshold: int = 2) -> tuple[int, ...]:
    """Those hit fewer times than that, then the others; of each the least recently used."""
    return (int(node.hits >= protected_threshold), node.last_used)


def tlru(node: Node, threshold: int, next_prompt_estimate: int) -> tuple[int, ...]:
    """Ends of branches that a next prompt of so many tokens can do without, and still leave no more
    than `threshold` to compute; then the least recently used (arXiv 2510.15152).

    A branch is as long as it ever was, in whole units, so what is left of it stays.
    """
    assert node.parent is not None
    behind = node.history - node.parent.end
    is_spare = not node.children and behind <= threshold - next_prompt_estimate
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
    """The key of a policy with these numbers; ConfigError when there is no such policy."""
    return partial(EVICTION.load(name), **numbers)
