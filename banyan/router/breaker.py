"""Breaker: whether a worker that failed several times in a row is asked at all.

Knows no network and no clock.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum


class Circuit(Enum):
    """The state of a breaker; its value is how metrics show it."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True)
class BreakerRule:
    """When a breaker opens and closes.

    Attributes:
        failures: so many in a row, all within `window_s`, open it; 0 = it never opens. A success
            between two of them starts the count again.
        successes: so many in a row close it.
        open_s: how long after the last failure nobody is sent there.
    """

    failures: int = 10
    successes: int = 3
    open_s: float = 60.0
    window_s: float = 120.0


class Breaker:
    """One worker's. Times are seconds of one clock that never goes back."""

    def __init__(self, rule: BreakerRule) -> None:
        self._rule = rule
        self._failed_s: deque[float] = deque()
        self._succeeded = 0
        self._is_open = False
        self._is_probing = False
        self.last_failed_s = 0.0
        """When the last failure was; it means nothing where there was none."""

    def state(self, now: float) -> Circuit:
        if not self._is_open:
            return Circuit.CLOSED
        return Circuit.HALF_OPEN if now - self.last_failed_s >= self._rule.open_s else Circuit.OPEN

    def lets_in(self, now: float) -> bool:
        """Whether a request may be sent; while half open, one at a time."""
        state = self.state(now)
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self._is_probing)

    def begin(self, now: float) -> bool:
        """A request is sent, and `end` follows; whether it tries out a worker that had failed."""
        is_probe = self.state(now) is Circuit.HALF_OPEN
        self._is_probing |= is_probe
        return is_probe

    def end(self, is_good: bool | None, is_probe: bool, now: float) -> None:
        """A request that was sent has ended: in order, by the worker's fault, or (None) in a way
        that says nothing of the worker, as when its client left or the worker was busy.

        Args:
            is_probe: as `begin` said.
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
        """Forget all failures: the worker has begun anew."""
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
