"""Eviction policies: a key function each; the node with the smallest key goes first."""

from collections.abc import Callable

from banyan.base.table import Table
from banyan.memory.radix import Node

EvictionKey = Callable[[Node], tuple[int, ...]]


def lru(node: Node) -> tuple[int, ...]:
    """Least recently used."""
    return (node.last_used,)


def lfu(node: Node) -> tuple[int, ...]:
    """Least often hit, the least recently used among equals."""
    return (node.hits, node.last_used)


def fifo(node: Node) -> tuple[int, ...]:
    """Oldest insertion."""
    return (node.born,)


def priority(node: Node) -> tuple[int, ...]:
    """Lowest request priority, the least recently used among equals."""
    return (node.priority, node.last_used)


EVICTION: Table[EvictionKey] = Table(
    "eviction policy",
    {name: f"banyan.memory.eviction:{name}" for name in ("lru", "lfu", "fifo", "priority")},
)
