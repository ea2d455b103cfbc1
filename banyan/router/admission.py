"""Limit the requests in progress, the requests that wait and the requests started per second."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from banyan.base.errors import RequestError
from banyan.router.config import LimitConfig


class AdmissionLimiter:
    """Admits requests under the limits of the configuration.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, limits: LimitConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._tokens = float(limits.rate)
        self._filled_s = now()
        self.inside = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Count as a request in progress while the block runs.

        Raises:
            RequestError: 429 if the rate or the queue is full, or the wait took too long.
        """
        self._count()
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    def _count(self) -> None:
        """Take one token from a bucket that gains `rate` tokens per second and holds `rate`."""
        rate = self._limits.rate
        if not rate:
            return
        now = self._now()
        self._tokens = min(float(rate), self._tokens + (now - self._filled_s) * rate)
        self._filled_s = now
        if self._tokens < 1:
            raise _refusal(f"more than {rate} requests a second came", "rate_limited")
        self._tokens -= 1

    async def _enter(self) -> None:
        most = self._limits.concurrent
        if most < 0 or (self.inside < most and not self._waiting):
            self.inside += 1
            return
        if len(self._waiting) >= self._limits.waiting:
            raise _refusal(
                f"{self.inside} requests are in progress and {len(self._waiting)} wait, "
                "as many as may",
                "queue_full",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._limits.waiting_s):
                await turn  # the request that leaves counts this one in
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # admitted and timed out at the same time
            else:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                waited = f"no place came free within {self._limits.waiting_s:g} s"
                raise _refusal(waited, "queue_timeout") from None
            raise

    def _leave(self) -> None:
        self.inside -= 1
        while self._waiting and self.inside < self._limits.concurrent:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.inside += 1


def _refusal(text: str, code: str) -> RequestError:
    return RequestError(text, status=429, code=code, hint="Send it again in a few seconds")
