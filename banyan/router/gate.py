"""Gate: how many requests are in progress at a time, how many wait, and how many begin a second."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from banyan.base.errors import RequestError
from banyan.router.config import LimitConfig


class Gate:
    """
    Args:
        now: seconds of a clock that never goes back.
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
    async def place(self) -> AsyncGenerator[None]:
        """A place among the requests in progress, for as long as the block runs.

        Raises:
            RequestError: 429; too many come, too many wait, or none ended in time.
        """
        self._count()
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    def _count(self) -> None:
        """Take one of the tokens, of which `rate` come each second and no more are kept."""
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
                await turn  # who leaves has counted this one in
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came together with the end of the wait
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
