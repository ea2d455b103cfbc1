"""FairQueue: whose request enters next where several callers wait, and who has waited too long.

Callers of one priority get equal shares, each in proportion to its weight, however many requests
they bring: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024). A caller is charged one for each position that is computed for it and one more for each
token that it gets, and the one that was charged least goes first. Who comes back after a pause has
saved nothing up: its count is lifted to that of the least served of the others.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from banyan.scheduler.budget import Limits
from banyan.scheduler.request import Request
from banyan.scheduler.request_table import RequestTable


class FairQueue:
    """
    Args:
        max_wait_s: a request that has waited longer goes before all others, whatever its priority;
            0 = none does.
    """

    def __init__(self, max_wait_s: float = 0.0) -> None:
        self._max_wait_s = max_wait_s
        self._charged: dict[bytes, float] = {}
        """Of the callers with requests since nobody had any, each over its weight."""

    def join(self, request: Request, others: Iterable[Request]) -> None:
        """A request comes, beside `others` that live."""
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

    def charge(self, request: Request, tokens: int) -> None:
        """`tokens` positions and output tokens were its own."""
        if len(self._charged) > 1:
            self._charged[request.caller] += tokens / request.weight

    def deal(self, ordered: Sequence[Request], now: float) -> list[Request]:
        """The waiting requests, in the order of the queue policy, as they are to be tried."""
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
        dealt: list[Request] = []
        while heads:
            _, charged, _, queue = heads[0]
            request = queue.popleft()
            dealt.append(request)
            if queue:
                charged += request.known / request.weight
                heapreplace(heads, self._head(queue, charged, now))
            else:
                heappop(heads)
        return dealt

    def _head(
        self, queue: deque[Request], charged: float, now: float
    ) -> tuple[float, float, int, deque[Request]]:
        first = queue[0]
        priority, arrival = first.rank
        is_overdue = self._overdue_first(first, now)[0] == 0
        return (float("-inf") if is_overdue else priority, charged, arrival, queue)

    def _overdue_first(self, request: Request, now: float) -> tuple[int, float]:
        waited_s = now - request.submitted_s
        is_overdue = 0 < self._max_wait_s < waited_s
        return (0, request.submitted_s) if is_overdue else (1, 0.0)


def end_overdue(request_table: RequestTable, limits: Limits, now: float) -> None:
    """Fail each request that has waited or run for longer than is allowed."""
    if limits.wait_s <= 0 and limits.run_s <= 0:
        return
    for request in (*request_table.waiting, *request_table.running):
        has_run = request.admitted_s >= 0
        what, limit_s, since_s = (
            ("has run", limits.run_s, request.admitted_s)
            if has_run
            else ("has waited", limits.wait_s, request.submitted_s)
        )
        if 0 < limit_s < now - since_s:
            text = f"The request {what} for {now - since_s:.1f} s; {limit_s:g} s are allowed."
            request_table.fail(request, 503, text, "timed_out")
