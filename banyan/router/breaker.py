"""Circuit breaker: send no requests to a worker that failed several times in a row."""

from collections import deque
from dataclasses import dataclass
from enum import Enum


class CircuitState(Enum):
    """State of a breaker; the value is the one in the metrics."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True)
class BreakerRule:
    """When a breaker opens and closes.

    Attributes:
        failures: consecutive failures within `window_s` that open it; 0 = never. A success resets
            the count.
        successes: consecutive successes that close it.
        open_s: seconds after the last failure without requests.
    """

    failures: int = 10
    successes: int = 3
    open_s: float = 60.0
    window_s: float = 120.0


class CircuitBreaker:
    """Breaker of one worker. Times are seconds of a monotonic clock."""

    def __init__(self, rule: BreakerRule) -> None:
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
        if not self._rule.failures:
            return
        self._failed_s.append(now)
        while now - self._failed_s[0] > self._rule.window_s:
            self._failed_s.popleft()
        if len(self._failed_s) >= self._rule.failures:
            self._is_open = True
            self._failed_s.clear()
