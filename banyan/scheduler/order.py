"""Queue policies: in which order waiting requests are tried. Pure functions."""

from collections.abc import Callable

from banyan.base.table import Table
from banyan.scheduler.request import Request

Probe = Callable[[Request], int]
"""Tokens of a request that the cache holds."""
QueueOrder = Callable[[list[Request], Probe], list[Request]]
"""(waiting by rank, probe) -> in the order to be tried."""

LPM_QUEUE = 128
"""Longer queues are served in arrival order: probing all of them would cost more than it saves."""


def fcfs(waiting: list[Request], probe: Probe) -> list[Request]:
    """Higher priority first, then arrival."""
    return waiting


def lpm(waiting: list[Request], probe: Probe) -> list[Request]:
    """Longest cached prefix first within one priority."""
    if len(waiting) > LPM_QUEUE:
        return waiting
    return sorted(waiting, key=lambda r: (r.rank[0], -probe(r), r.rank[1]))


def lof(waiting: list[Request], probe: Probe) -> list[Request]:
    """Longest allowed output first within one priority."""
    return sorted(waiting, key=lambda r: (r.rank[0], -r.sampling.max_new_tokens, r.rank[1]))


ORDERS: Table[QueueOrder] = Table(
    "schedule policy", {name: f"banyan.scheduler.order:{name}" for name in ("fcfs", "lpm", "lof")}
)
