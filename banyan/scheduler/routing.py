"""Which of several replicas takes a request: pure functions of what they have taken on.

`total_requests` and `total_tokens` choose the replica with the least of it, the first of equals.
"""

from collections.abc import Callable, Sequence

from banyan.base.table import Table

Route = Callable[[Sequence[int], Sequence[int], int], int]
"""(open requests of each living replica, their prompts plus the most they may produce in tokens,
requests routed so far) -> index of the replica that takes the next."""

ROUTES: Table[Route] = Table(
    "load balance method",
    {
        "round_robin": "banyan.scheduler.routing:round_robin",
        "total_requests": "banyan.scheduler.routing:total_requests",
        "total_tokens": "banyan.scheduler.routing:total_tokens",
    },
)


def round_robin(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return routed % len(requests)


def total_requests(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(requests)), key=lambda i: (requests[i], i))


def total_tokens(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(tokens)), key=lambda i: (tokens[i], i))
