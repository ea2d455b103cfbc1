"""State that the routes of a router share: workers, admission limits, keys, metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER, FairShare, Turns
from banyan.config.schema import Config
from banyan.router.config import LimitConfig, RouterConfig
from banyan.router.models import ModelServers
from banyan.router.worker import Worker
from banyan.router.worker_pool import WorkerPool
from banyan.server.errors import RETRY_AFTER_S
from banyan.server.http.auth import Keys, TenantSigner, open_signer
from banyan.server.http.exchange import HttpExchange


class AdmissionLimiter:
    """Admits requests under the limits of the configuration, which callers share.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, limits: LimitConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._turns = Turns(FairShare(limits.concurrent, reserved=limits.concurrent // 8))
        self._waiting = FairShare(limits.waiting)
        self._started = FairShare(limits.rate)
        """Requests of the last second. They leak at the rate of the limit."""
        self._leaked_s = now()

    @property
    def waiting(self) -> int:
        return self._waiting.total

    @property
    def inside(self) -> int:
        return self._turns.inside

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Count as a request in progress while the block runs.

        Raises:
            RequestError: 429 if the rate or the queue is full, or the wait took too long.
        """
        caller = CALLER.get()
        self._count(caller)
        await self._enter(caller)
        try:
            yield
        finally:
            self._turns.leave(caller)

    def _count(self, caller: bytes) -> None:
        """Count a request that starts: a bucket that holds `rate` and leaks `rate` per second."""
        rate, started = self._limits.rate, self._started
        if not rate:
            return
        now = self._now()
        leaked = int((now - self._leaked_s) * rate)
        self._leaked_s = self._leaked_s + leaked / rate if started.total > leaked else now
        for _ in range(min(leaked, started.total)):
            started.give_back(started.heaviest())
        if not started.fits(caller):
            raise _refusal(f"more than {rate} requests a second came", "rate_limited")
        started.take(caller)

    async def _enter(self, caller: bytes) -> None:
        if self._turns.is_free(caller):
            await self._turns.enter(caller)
            return
        if not self._waiting.fits(caller):
            raise _refusal(
                f"{self.inside} requests are in progress and {self.waiting} wait, "
                f"{self._waiting.held_by(caller)} of them of this caller, as many as may",
                "queue_full",
            )
        self._waiting.take(caller)
        try:
            async with asyncio.timeout(self._limits.waiting_s):
                await self._turns.enter(caller)
        except TimeoutError:
            waited = f"no place came free within {self._limits.waiting_s:g} s"
            raise _refusal(waited, "queue_timeout") from None
        finally:
            self._waiting.give_back(caller)


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
    models: ModelServers | None = None
    """The models whose servers this router starts; None if it does not."""
    draining: bool = False
    started_s: float = field(default_factory=time.monotonic)
    config: Config = field(init=False)
    """The server and log settings that the HTTP layer reads."""
    keys: Keys = field(init=False)
    signer: TenantSigner | None = field(init=False)
    """Signs the callers of forwarded requests; None without a secret."""

    def __post_init__(self) -> None:
        server = self.settings.server
        self.config = Config(server=server, observe=self.settings.observe)
        self.keys = Keys(server.api_key, server.api_key_file)
        self.signer = open_signer(self.settings.secret)

    def request_scopes(self, call: object) -> list[AbstractContextManager[None]]:
        """A router has no spans and no labels of its own."""
        return []

    def retry_after_s(self) -> int:
        return RETRY_AFTER_S

    def has_begun(self, work: "asyncio.Task[None]") -> bool:
        return False

    def sees_workers(self, exchange: HttpExchange) -> bool:
        """Whether the caller may know addresses and troubles of workers."""
        shows = self.settings.visibility.shows_workers
        return shows or exchange.context.is_admin or not self.keys.are_required

    def name_of(self, worker: Worker, exchange: HttpExchange) -> str:
        """The address of a worker, or its number for callers that may not know that."""
        return worker.url if self.sees_workers(exchange) else f"worker {worker.number}"

    def trouble(self, exchange: HttpExchange) -> str:
        """Why no request can be taken, as far as the caller may know; "" if one can."""
        if self.draining:
            return "the router is shutting down"
        trouble = "" if self.models is not None else self.pool.trouble()
        return trouble if not trouble or self.sees_workers(exchange) else "no worker can be asked"
