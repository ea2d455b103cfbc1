"""Schedule policies: the order in which waiting requests are admitted.

A policy is a pure function that sorts the queue; higher priorities always go first. FairQueue then
shares admission between callers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from heapq import heapify, heappop, heapreplace

from banyan.base.table import Table
from banyan.kv_cache.cache import Match
from banyan.kv_cache.radix_tree import Node
from banyan.scheduler.request import Request

Probe = Callable[[Request], Match]
"""Returns the cached prefix of a request."""
SchedulePolicy = Callable[[list[Request], Probe], list[Request]]
"""(waiting requests by rank, probe) -> waiting requests in the order to try."""

LPM_QUEUE = 128
"""Longer queues are served in arrival order: probing each request would cost more than it saves."""
_SCATTER = 0x9E37_79B1
"""2**32 / golden ratio, odd: its multiples are spread over all 32-bit numbers."""


def fcfs(waiting: list[Request], probe: Probe) -> list[Request]:
    """First come, first served."""
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
    """Pseudo-random, but the same in every replay."""
    return sorted(waiting, key=lambda r: (r.rank[0], r.rank[1] * _SCATTER & 0xFFFF_FFFF))


SCHEDULE_POLICIES: Table[SchedulePolicy] = Table(
    "schedule policy",
    {
        "fcfs": "banyan.scheduler.schedule_policy:fcfs",
        "lpm": "banyan.scheduler.schedule_policy:lpm",
        "dfs-weight": "banyan.scheduler.schedule_policy:dfs_weight",
        "lof": "banyan.scheduler.schedule_policy:lof",
        "random": "banyan.scheduler.schedule_policy:random",
    },
)


class FairQueue:
    """Shares admission between callers of equal priority, in proportion to their weights.

    This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
    (OSDI 2024). A caller is charged one per computed position and one more per output token. The
    caller with the lowest charge goes first. A caller that returns after a pause is raised to the
    lowest charge of the others, so that it cannot save up service.

    Args:
        max_wait_s: requests that have waited longer go before all others, whatever their priority;
            0 = off.
    """

    def __init__(self, max_wait_s: float = 0.0) -> None:
        self._max_wait_s = max_wait_s
        self._charged: dict[bytes, float] = {}
        """Charge / weight of each caller since the engine was last idle."""

    def join(self, request: Request, others: Iterable[Request]) -> None:
        """A new request arrives while `others` are alive."""
        caller, least = request.caller, -1.0
        for other in others:
            if other.caller == caller:
                return
            charged = self._charged[other.caller]
            least = charged if least < 0 else min(least, charged)
        if least < 0:
            self._charged = {caller: 0.0}
        else:
            self._charged[caller] = max(self._charged.get(caller, 0.0), least)

    @property
    def callers(self) -> Set[bytes]:
        """Callers since the engine was last idle."""
        return self._charged.keys()

    def is_before(self, request: Request, caller: bytes) -> bool:
        """Whether the caller of `request` goes before `caller`."""
        return self._charged[request.caller] < self._charged[caller]

    def charge(self, request: Request, tokens: int) -> None:
        """Charge `tokens` positions and output tokens to the caller."""
        if len(self._charged) > 1:
            self._charged[request.caller] += tokens / request.weight

    def interleave(self, ordered: Sequence[Request], now: float) -> list[Request]:
        """The waiting requests in the order to try, given the order of the schedule policy."""
        if self._max_wait_s:
            ordered = sorted(ordered, key=lambda r: self._overdue_first(r, now))
        if len(self._charged) < 2:
            return list(ordered)
        queues: dict[bytes, deque[Request]] = {}
        for request in ordered:
            queues.setdefault(request.caller, deque()).append(request)
        if len(queues) < 2:
            return list(ordered)
        heads = [self._head(queue, self._charged[caller], now) for caller, queue in queues.items()]
        heapify(heads)
        merged: list[Request] = []
        while heads:
            _, charged, _, queue = heads[0]
            request = queue.popleft()
            merged.append(request)
            if queue:
                charged += request.known / request.weight
                heapreplace(heads, self._head(queue, charged, now))
            else:
                heappop(heads)
        return merged

    def _head(
        self, queue: deque[Request], charged: float, now: float
    ) -> tuple[float, float, int, deque[Request]]:
        """Heap entry of a caller: priority, charge and arrival of its first request."""
        first = queue[0]
        priority, arrival = first.rank
        is_overdue = self._overdue_first(first, now)[0] == 0
        return (float("-inf") if is_overdue else priority, charged, arrival, queue)

    def _overdue_first(self, request: Request, now: float) -> tuple[int, float]:
        waited_s = now - request.stats.submitted_s
        is_overdue = 0 < self._max_wait_s < waited_s
        return (0, request.stats.submitted_s) if is_overdue else (1, 0.0)
