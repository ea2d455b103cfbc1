"""Queue policies: in which order waiting requests are tried. Pure functions.

All of them serve higher priorities first; they decide among equals.
"""

from collections.abc import Callable

from banyan.base.table import Table
from banyan.kv_cache.cache import Match
from banyan.kv_cache.radix_tree import Node
from banyan.scheduler.request import Request

Probe = Callable[[Request], Match]
"""What of a request the cache holds."""
QueueOrder = Callable[[list[Request], Probe], list[Request]]
"""(waiting by rank, probe) -> in the order to be tried."""

LPM_QUEUE = 128
"""Longer queues are served in arrival order: probing all of them would cost more than it saves."""
_SCATTER = 0x9E37_79B1
"""2**32 / golden ratio, odd: multiples of it fall all over 32 bits."""


def fcfs(waiting: list[Request], probe: Probe) -> list[Request]:
    """Arrival."""
    return waiting


def lpm(waiting: list[Request], probe: Probe) -> list[Request]:
    """Longest cached prefix first."""
    if len(waiting) > LPM_QUEUE:
        return waiting
    return sorted(waiting, key=lambda r: (r.rank[0], -probe(r).tokens, r.rank[1]))


def dfs_weight(waiting: list[Request], probe: Probe) -> list[Request]:
    """Depth first through the cached prefixes, the branch with most requests first.

    Requests that share a branch run together, so that it is not evicted between them.
    """
    if len(waiting) > LPM_QUEUE:
        return waiting
    paths = {request.id: probe(request).path for request in waiting}
    weights: dict[Node, int] = {}
    for path in paths.values():
        for node in path:
            weights[node] = weights.get(node, 0) + 1
    first_seen = {node: number for number, node in enumerate(weights)}

    def place(request: Request) -> list[tuple[int, int, int]]:
        path = [(0, -weights[node], first_seen[node]) for node in paths[request.id]]
        return [(request.rank[0], 0, 0), *path, (1, 0, request.rank[1])]

    return sorted(waiting, key=place)


def lof(waiting: list[Request], probe: Probe) -> list[Request]:
    """Longest allowed output first."""
    return sorted(waiting, key=lambda r: (r.rank[0], -r.sampling.max_new_tokens, r.rank[1]))


def random(waiting: list[Request], probe: Probe) -> list[Request]:
    """No order that anyone could use; the same in every replay."""
    return sorted(waiting, key=lambda r: (r.rank[0], r.rank[1] * _SCATTER & 0xFFFF_FFFF))


ORDERS: Table[QueueOrder] = Table(
    "schedule policy",
    {
        "fcfs": "banyan.scheduler.queue_order:fcfs",
        "lpm": "banyan.scheduler.queue_order:lpm",
        "dfs-weight": "banyan.scheduler.queue_order:dfs_weight",
        "lof": "banyan.scheduler.queue_order:lof",
        "random": "banyan.scheduler.queue_order:random",
    },
)
