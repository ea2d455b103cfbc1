"""State that the routes of a router share: workers, admission limits, keys, metrics."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.config.schema import Config
from banyan.router.config import LimitConfig, RouterConfig
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.api_keys import Keys
from banyan.server.http.app import RequestScope
from banyan.server.http.exchange import RETRY_AFTER_S


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


class RouterMetrics(Protocol):
    """What a router counts."""

    kind: str
    """Content type of `show`."""

    def ended(self, route: str, status: int, seconds: float) -> None:
        """A request has ended."""
        ...

    def retried(self, route: str) -> None:
        """A request is retried."""
        ...

    def broke_off(self, route: str) -> None:
        """A worker was lost after the client had received part of its response."""
        ...

    def show(self) -> bytes: ...


@dataclass
class RouterState:
    """Shared state. `draining` is never reset."""

    settings: RouterConfig
    pool: WorkerPool
    admission: AdmissionLimiter
    metrics: RouterMetrics | None = None
    """None if metrics are off."""
    draining: bool = False
    started_s: float = field(default_factory=time.monotonic)
    config: Config = field(init=False)
    """The server and log settings that the HTTP layer reads."""
    keys: Keys = field(init=False)

    def __post_init__(self) -> None:
        server = self.settings.server
        self.config = Config(server=server, observe=self.settings.observe)
        self.keys = Keys(server.api_key, server.api_key_file)

    @property
    def request_scopes(self) -> Sequence[RequestScope]:
        return ()

    def retry_after_s(self) -> int:
        return RETRY_AFTER_S

    def has_begun(self, work: "asyncio.Task[None]") -> bool:
        return False

    def trouble(self) -> str:
        """Why no request can be taken; "" if one can."""
        return "the router is shutting down" if self.draining else self.pool.trouble()
