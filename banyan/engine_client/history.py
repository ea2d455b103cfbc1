"""What the console shows of the past: the latest ended requests, and the load of the last hour.

Both are in memory and bounded. They contain no text of a request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.engine_client.request_log import Ends, times

MAX_ENDED = 500
"""Ended requests that are kept."""
PERIOD_S = 10.0
"""Between two samples of the load."""
NUM_SAMPLES = 361
"""Of an hour."""

COUNTERS = ("output_tokens", "prompt_tokens", "cached_tokens", "steps")
"""Counters of Stats in a sample; their sums over all replicas."""


class EndedRequests(Ends):
    """The latest ended requests, with the times of their phases. Implements MetricsObserver."""

    def __init__(self) -> None:
        self._ended: deque[tuple[bytes, dict[str, object]]] = deque(maxlen=MAX_ENDED)

    def ended(self, outcome: RequestOutcome) -> None:
        request, usage = outcome.request, outcome.usage
        row: dict[str, object] = {
            "rid": request.id,
            "route": request.route,
            "key": request.key_name,
            "ended": round(time.time(), 3),
            "reason": outcome.reason,
            "prompt_tokens": usage.prompt_tokens if usage else len(request.prompt),
            "cached_tokens": usage.cached_tokens if usage else 0,
            "output_tokens": usage.output_tokens if usage else 0,
            "retractions": usage.retractions if usage else 0,
            **times(outcome),
        }
        self._ended.append((request.message.caller, row))

    def rows(self, caller: bytes | None) -> list[dict[str, object]]:
        """The requests of a caller, newest first; None = of all."""
        return [row for owner, row in reversed(self._ended) if caller in (None, owner)]


class LoadHistory:
    """Samples of the load, one each PERIOD_S.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    def start(self, replicas: Callable[[], Sequence[Replica]]) -> None:
        """Take samples on the running event loop, from now on."""
        self.sample(replicas(), time.time())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PERIOD_S, self.start, replicas)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sample(self, replicas: Sequence[Replica], now_s: float) -> None:
        ready = [(one.stats, one.ready) for one in replicas if one.alive and one.ready is not None]
        page = self._page_size
        sample: dict[str, float] = {
            "at": round(now_s, 3),
            "running": sum(stats.running for stats, _ in ready),
            "waiting": sum(stats.waiting for stats, _ in ready),
            "used": sum((s.held_pages + s.in_flight_pages) * page for s, _ in ready),
            "kept": sum(
                (s.held_pages + s.in_flight_pages + s.cached_pages) * page for s, _ in ready
            ),
            "most": sum(facts.max_total_tokens for _, facts in ready),
        }
        for name in COUNTERS:
            sample[name] = sum(getattr(stats, name) for stats, _ in ready)
        self._samples.append(sample)

    def samples(self) -> list[dict[str, float]]:
        """From the oldest to the newest: counters as they were, not their growth."""
        return list(self._samples)
