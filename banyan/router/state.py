"""What the routes of a router share. One object, made by the composition root."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from banyan.config.schema import Config
from banyan.router.config import RouterConfig
from banyan.router.figures import Figures
from banyan.router.gate import Gate
from banyan.router.worker_pool import Fleet
from banyan.server.http.api_keys import Keys
from banyan.server.http.app import RequestScope
from banyan.server.http.exchange import RETRY_AFTER_S


@dataclass
class RouterState:
    """`draining` latches."""

    settings: RouterConfig
    fleet: Fleet
    gate: Gate
    figures: Figures | None = None
    """None where nothing is counted."""
    draining: bool = False
    started_s: float = field(default_factory=time.monotonic)
    config: Config = field(init=False)
    """What the HTTP pieces read: the parts about the server and its logs."""
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
        """Why no request can be taken; "" when one can."""
        return "the router is shutting down" if self.draining else self.fleet.trouble()
