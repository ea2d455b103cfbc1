"""State that the routes of a router share, and the interface of its metrics."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from banyan.config.schema import Config
from banyan.router.admission import AdmissionLimiter
from banyan.router.config import RouterConfig
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.api_keys import Keys
from banyan.server.http.app import RequestScope
from banyan.server.http.exchange import RETRY_AFTER_S


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
