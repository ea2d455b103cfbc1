"""Which of several replicas or servers takes a request: pure functions of what they have taken on.

`total_requests` and `total_tokens` choose the replica with the least of it, the first of equals.
The rest is for a router of servers, which draws its own lots and remembers prompts
(`scheduler/prefix_hashes.py`); indices are positions among the servers that can take the request.
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.base.table import Table

Route = Callable[[Sequence[int], Sequence[int], int], int]
"""(open requests of each living replica, their prompts plus the most they may produce in tokens,
requests routed so far) -> index of the replica that takes the next."""

FOLLOW_ROOM = "follow_bootstrap_room"
"""The method by which a request's bootstrap room selects the replica."""
ROUTES: Table[Route] = Table(
    "load balance method",
    {
        "round_robin": "banyan.scheduler.routing:round_robin",
        "total_requests": "banyan.scheduler.routing:total_requests",
        "total_tokens": "banyan.scheduler.routing:total_tokens",
        FOLLOW_ROOM: "banyan.scheduler.routing:round_robin",  # without a room
    },
)


def round_robin(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return routed % len(requests)


def total_requests(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(requests)), key=lambda i: (requests[i], i))


def total_tokens(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(tokens)), key=lambda i: (tokens[i], i))


def power_of_two(requests: Sequence[int], first: int, second: int) -> int:
    """The less busy of two servers that were drawn."""
    return second if requests[second] < requests[first] else first


@dataclass(frozen=True)
class CacheAware:
    """When a prompt's cached beginning decides, and when the load does.

    Attributes:
        threshold: share of a prompt that a server must have seen to get it.
        most_apart, most_times: the busiest server has more requests than the idlest by more than
            so many, and more than so many times as many: then the load decides.
    """

    threshold: float = 0.3
    most_apart: int = 64
    most_times: float = 1.5


def cache_aware(
    requests: Sequence[int], seen: Sequence[float], held: Sequence[int], rule: CacheAware
) -> int:
    """The server that has most of the prompt; where none has enough of it, or the servers are too
    unequally busy, the idlest, among equals the one that remembers least.

    Args:
        requests: open at each server.
        seen: share of the prompt that each has seen at the beginning of another, in [0, 1].
        held: how much each remembers.
    """
    idlest = min(range(len(requests)), key=lambda i: (requests[i], held[i], i))
    low, high = requests[idlest], max(requests)
    if high - low > rule.most_apart and high > low * rule.most_times:
        return idlest
    best = min(range(len(seen)), key=lambda i: (-seen[i], requests[i], i))
    return best if seen[best] > rule.threshold else idlest


def bucket_bounds(lengths: Sequence[int], servers: int) -> list[int]:
    """Lengths at which prompts are parted, so that each server has about as much of them to
    compute: one bound fewer than there are servers.

    Args:
        lengths: of prompts as they come.
    """
    whole, seen, below, bounds = sum(lengths), 0, 0, list[int]()
    for length, count in sorted(Counter(lengths).items()):
        before, seen = seen, seen + length * count
        while len(bounds) < servers - 1 and seen * servers >= whole * (len(bounds) + 1):
            share = whole * (len(bounds) + 1) / servers
            bounds.append(below if before and share - before < seen - share else length)
        below = length
    return bounds


def bucket(requests: Sequence[int], length: int, bounds: Sequence[int], rule: CacheAware) -> int:
    """The server of prompts of this length; where servers are too unequally busy, the idlest."""
    idlest = min(range(len(requests)), key=lambda i: (requests[i], i))
    low, high = requests[idlest], max(requests)
    if len(bounds) != len(requests) - 1:
        return idlest
    if high - low > rule.most_apart and high > low * rule.most_times:
        return idlest
    return bisect_left(bounds, length)


def consistent_hashing(names: Sequence[str], key: str) -> int:
    """The server whose name scores highest with `key`: when one goes, only its keys move."""

    def score(i: int) -> bytes:
        return hashlib.blake2b(f"{names[i]}\0{key}".encode(), digest_size=8).digest()

    return max(range(len(names)), key=score)
