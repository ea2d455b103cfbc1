"""What the routes share: the configuration, the service once it is ready, and the open requests.

One object, made by the composition root and passed to the app; there are no globals.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.config.card import ModelCard
from banyan.config.schema import Config
from banyan.frontend.generation import Generator
from banyan.messages.events import Ready, Reply, Stats
from banyan.server.errors import unavailable


class Tokenizer(Protocol):
    """The part of frontend.tokenizer.Tokenizer that routes use."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str: ...


class Chat(Protocol):
    """Messages to token ids; text inside a message never becomes a special token."""

    def encode(self, messages: list[dict[str, object]], **options: object) -> list[int]: ...


class EngineClient(Protocol):
    """The part of frontend.client.EngineClient that routes use."""

    @property
    def stats(self) -> Stats: ...
    def health(self) -> str:
        """"" while the engine makes progress, else what is wrong."""
        ...

    async def control(self, verb: str, **args: str | int | float | bool) -> Reply: ...
    def abort(self, request: RequestId) -> None: ...


@dataclass(frozen=True)
class Service:
    """Everything that exists only once the engine is ready."""

    card: ModelCard
    ready: Ready
    generator: Generator
    tokenizer: Tokenizer
    chat: Chat
    client: EngineClient
    sampling_defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def context_length(self) -> int:
        return self.ready.max_request_tokens


def fresh_id() -> str:
    """128 random bits as hex: a request id that no client can guess or choose."""
    return os.urandom(16).hex()


class OpenRequests:
    """Requests that live now, by the id their client knows; `rid` prefixes name batches."""

    def __init__(self) -> None:
        self._live: dict[RequestId, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: RequestId) -> None:
        if request in self._live:
            raise RequestError(f"Duplicate request ID detected: {request}", param="rid")
        self._live[request] = None
        self._idle.clear()

    def drop(self, request: RequestId) -> None:
        self._live.pop(request, None)
        if not self._live:
            self._idle.set()

    def starting_with(self, prefix: str) -> list[RequestId]:
        return [r for r in self._live if r.startswith(prefix)]

    async def wait_idle(self) -> None:
        await self._idle.wait()


@dataclass
class ServerState:
    """What changes while the server lives. `service` is set once; `dead` and `draining` latch."""

    config: Config
    started_s: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    service: Service | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Start-up phases in seconds, in order."""
    draining: bool = False
    dead: str = ""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when open exchanges must end now (drain time is over)."""
    open: OpenRequests = field(default_factory=OpenRequests)
    exchanges: int = 0
    """HTTP exchanges in progress."""

    def trouble(self) -> str:
        """Why no request can be admitted; "" when one can."""
        if self.dead:
            return f"the engine has died: {self.dead}"
        if self.draining:
            return "the server is shutting down"
        if self.service is None:
            return "the server is starting"
        return self.service.client.health()

    def admit(self) -> Service:
        """The service, or RequestError 503 that says why there is none."""
        if self.dead:
            raise unavailable(f"the engine has died: {self.dead}", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down; send the request elsewhere", "draining")
        if self.service is None:
            raise unavailable("the model is still loading; ask /readyz for when", "starting")
        return self.service

    @property
    def served_name(self) -> str:
        return self.config.model.served_name or self.config.model.source
