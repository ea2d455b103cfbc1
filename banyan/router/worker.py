"""A server that the router forwards to, its state, its circuit breaker, and whether it can take a
request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum

from banyan.router.config import BreakerConfig, HealthConfig, WorkerSpec
from banyan.router.upstream import Upstream
from banyan.scheduler.routing import BLOCK_BYTES, Contents, Prefixes


class CircuitState(Enum):
    """State of a breaker; the value is the one in the metrics."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class CircuitBreaker:
    """Breaker of one worker. Times are seconds of a monotonic clock."""

    def __init__(self, rule: BreakerConfig) -> None:
        self._rule = rule
        self._failed_s: deque[float] = deque()
        self._succeeded = 0
        self._is_open = False
        self._is_probing = False
        self.last_failed_s = 0.0
        """Time of the last failure; meaningless if there was none."""

    def state(self, now: float) -> CircuitState:
        if not self._is_open:
            return CircuitState.CLOSED
        return (
            CircuitState.HALF_OPEN
            if now - self.last_failed_s >= self._rule.open_s
            else CircuitState.OPEN
        )

    def lets_in(self, now: float) -> bool:
        """Whether a request may be sent; one at a time while half open."""
        state = self.state(now)
        return state is CircuitState.CLOSED or (
            state is CircuitState.HALF_OPEN and not self._is_probing
        )

    def begin(self, now: float) -> bool:
        """Record that a request is sent; whether it is a probe. `end` must follow."""
        is_probe = self.state(now) is CircuitState.HALF_OPEN
        self._is_probing |= is_probe
        return is_probe

    def end(self, is_good: bool | None, is_probe: bool, now: float) -> None:
        """Record the end of a request.

        Args:
            is_good: False if the worker failed; None if the result says nothing about the worker
                (the client left, or the worker was busy).
            is_probe: the result of `begin`.
        """
        if is_probe:
            self._is_probing = False
        if is_good is None:
            return
        if not is_good:
            self.last_failed_s, self._succeeded = now, 0
            if not self._is_open:
                self._count(now)
            return
        self._failed_s.clear()
        if self._is_open:
            self._succeeded += 1
            self._is_open = self._succeeded < self._rule.successes

    def close(self) -> None:
        """Forget all failures, because the worker has restarted."""
        self._is_open = False
        self._failed_s.clear()

    def _count(self, now: float) -> None:
        if self._rule.is_off:
            return
        self._failed_s.append(now)
        while now - self._failed_s[0] > self._rule.window_s:
            self._failed_s.popleft()
        if len(self._failed_s) >= self._rule.failures:
            self._is_open = True
            self._failed_s.clear()


class Attempt:
    """One request at one worker. `is_good` is None while its result says nothing of the worker."""

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.is_good: bool | None = None


class Worker:
    """One server.

    Args:
        number: id within this router, never reused.
        tree_bytes: bytes of prompts that are remembered.
    """

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        breaker: BreakerConfig,
        health: HealthConfig,
        tree_bytes: int,
    ) -> None:
        self.number = number
        self.spec = spec
        self.upstream = Upstream(spec.url)
        self.url = self.upstream.url
        self.breaker = CircuitBreaker(breaker)
        self.prefixes = Prefixes(max(1, tree_bytes // BLOCK_BYTES))
        self.contents: list[Contents] | None = None
        """Cached prefixes that its events report, by replica; None without events."""
        self.open = 0
        """Requests in progress."""
        self.taken = 0
        """Requests sent so far."""
        self.failed = 0
        """Requests that failed."""
        self.models: tuple[str, ...] = ()
        """Names of what it serves, if the router asks for that; () = any."""
        self.bootstrap_port = spec.bootstrap_port
        """Where a prefill worker hands over; None = not known yet."""
        self.is_leaving = False
        """It gets no more requests and is removed when it has none."""
        self.trouble = "" if health.is_off else "it has not been asked yet"
        """Why it is not healthy; "" if it is."""
        self.has_been_well = health.is_off
        self.check_soon = asyncio.Event()
        """Set to have its health checked now."""
        self._health = health
        self._good = self._bad = 0

    @property
    def is_well(self) -> bool:
        return not self.trouble

    @property
    def is_here(self) -> bool:
        """Whether it is healthy and not being removed, whatever its breaker's state."""
        return self.is_well and not self.is_leaving

    def serves(self, model: str) -> bool:
        """Whether it has this model; "" = any."""
        return not model or not self.models or model in self.models

    def takes(self) -> bool:
        """Whether it can be sent a request now."""
        return self.is_here and self.breaker.lets_in(time.monotonic())

    def why_not(self) -> str:
        """A short reason why it cannot be sent a request."""
        if self.is_leaving:
            return "is being removed"
        return self.trouble or "has failed too often and is left alone for a while"

    @contextmanager
    def attempt(self) -> Generator[Attempt]:
        """Count a request to this worker while the block runs."""
        outcome = Attempt(self)
        self.open += 1
        self.taken += 1
        is_probe = self.breaker.begin(time.monotonic())
        try:
            yield outcome
        finally:
            self.open -= 1
            self.failed += outcome.is_good is False
            self.breaker.end(outcome.is_good, is_probe, time.monotonic())

    def record_check(self, trouble: str) -> bool:
        """Record the result of a health check ("" = healthy); whether `is_well` changed."""
        was_well = self.is_well
        if trouble:
            self._good, self._bad = 0, self._bad + 1
            if self._bad >= self._health.failures or not self.has_been_well:
                self.trouble = trouble
        else:
            self._good, self._bad = self._good + 1, 0
            if self._good >= self._health.successes or not self.has_been_well:
                self.trouble, self.has_been_well = "", True
        if self.is_well and not was_well:
            self.breaker.close()  # the failures were from before it came back
        return self.is_well != was_well
