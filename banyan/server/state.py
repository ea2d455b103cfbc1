"""What the routes share: the configuration, the service once it is ready, and the open requests.

One object, made by the composition root and passed to the app; there are no globals.
"""

import asyncio
import contextlib
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.base.version import own_version
from banyan.chat_template.named_templates import FillIn
from banyan.chat_template.template import Chat
from banyan.config.schema import Config
from banyan.engine_client.client import Replicas
from banyan.engine_client.metrics_observer import Meter, Metrics, tell_refused
from banyan.engine_client.request_records import Recent
from banyan.engine_client.throughput_estimate import UNKNOWN_S, wait_s
from banyan.messages.events import Ready
from banyan.model_config.model_config import ModelConfig
from banyan.parsers.choice import Parsers
from banyan.parsers.tool_calls.as_text import Tag
from banyan.requests.generation import Generator
from banyan.requests.lora_names import AdapterNames
from banyan.requests.request_spec import RequestSpec
from banyan.requests.sampling_params import NATIVE_DEFAULTS, DrawSeed, Limits, fresh_seed
from banyan.requests.sessions import Sessions
from banyan.server.errors import unavailable
from banyan.server.http.api_keys import Keys
from banyan.server.store.responses import ResponseStore
from banyan.server.store.storage import Storage, storage_path
from banyan.server.tool_servers.base import ToolServers
from banyan.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from banyan.server.http.app import RequestScope
    from banyan.server.http.exchange import HttpExchange

PROBE_HOLDS_S = 1.0
"""How long a passed health check counts for later callers."""


@dataclass(frozen=True)
class Service:
    """Everything that exists only once the engine is ready."""

    model_config: ModelConfig
    ready: Ready
    client: Replicas
    generator: Generator
    limits: Limits
    tokenizer: Tokenizer | None
    """None = ids only (--skip-tokenizer-init)."""
    chat: Chat | None
    """None = the model has no chat template."""
    parsers: Parsers = field(default_factory=Parsers)
    """What finds reasoning and tool calls in answers."""
    fill_in: FillIn | None = None
    """How a prompt and what comes behind the gap are put together; None = suffix is refused."""
    native_defaults: Mapping[str, object] = field(default_factory=lambda: NATIVE_DEFAULTS)
    """What sampling fields mean when absent."""
    chat_defaults: Mapping[str, object] = field(default_factory=dict)
    """The same for chat, where the model may recommend some; max_new_tokens null = what fits."""
    draw_seed: DrawSeed = fresh_seed
    meters: Sequence[Meter] = ()
    """Told of requests that `generator`, which has the like, does not get."""

    @property
    def tool_tag(self) -> Tag | None:
        """How calls are written where tools are shown as text, because the chat template has no
        place for them; None = it has, or no parser would find the calls."""
        if self.chat is None or self.chat.template.takes_tools or self.parsers.tools is None:
            return None
        return self.parsers.tools.tag

    def words(self) -> Tokenizer:
        """The tokenizer, or RequestError 400 when the server runs without one."""
        if self.tokenizer is None:
            raise RequestError(
                "this server runs without a tokenizer",
                code="no_tokenizer",
                hint="Send input_ids to /generate",
            )
        return self.tokenizer


_SEQUENCE = re.compile(r"_[0-9]+\Z")


class OpenRequests:
    """Requests that live now, by the id their client knows, and who has made them."""

    def __init__(self) -> None:
        self._live: dict[RequestId, bytes] = {}
        self._holders: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()
        """Tasks whose requests have begun."""
        self._dropped = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def holding(self, requests: Sequence[RequestSpec], owner: bytes) -> Iterator[None]:
        """Keep the ids of `requests` taken; RequestError 400 when one is."""
        added: list[RequestId] = []
        try:
            for request in requests:
                if request.id in self._live:
                    raise RequestError(f"Duplicate request ID detected: {request.id}", param="rid")
                self._live[request.id] = owner
                added.append(request.id)
            if (task := asyncio.current_task()) is not None:
                self._holders.add(task)
            yield
        finally:
            for id in added:
                del self._live[id]
            self._dropped.set()

    def has_held(self, work: "asyncio.Task[None]") -> bool:
        """Whether requests of this task have begun."""
        return work in self._holders

    def called(self, rid: str) -> list[RequestId]:
        """The request of this id, or the sequences of one (their ids are `rid`_NUMBER)."""
        return [r for r in self._live if r == rid or _SEQUENCE.sub("", r) == rid]

    def of(self, owner: bytes) -> list[RequestId]:
        """Those that a credential has made."""
        return [r for r, other in self._live.items() if other == owner]

    def all(self) -> list[RequestId]:
        return list(self._live)

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until a request ends, at most `timeout_s`."""
        self._dropped.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._dropped.wait()


class SharedProbe:
    """Runs one health check at a time, whatever the number of callers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._running: asyncio.Task[None] | None = None
        self._good_until_s = 0.0

    async def ask(self, check: Callable[[], Awaitable[None]]) -> None:
        """Return when `check` has passed, at most PROBE_HOLDS_S ago; raises what it raised."""
        if self._clock.now() < self._good_until_s:
            return
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(check))
        await asyncio.shield(self._running)

    async def _run(self, check: Callable[[], Awaitable[None]]) -> None:
        await check()
        self._good_until_s = self._clock.now() + PROBE_HOLDS_S


class Tracing(Protocol):
    """Traces requests (`admin.traces` implements it). Called on the event loop.

    No span carries text of a request.
    """

    def context(self, exchange: "HttpExchange") -> AbstractContextManager[None]:
        """The span of one HTTP request, in the caller's trace if its headers name one."""
        ...

    def watch(self, generator: Generator) -> Generator:
        """`generator` with a span for each sequence, and within it one for each phase."""
        ...

    def close(self) -> None:
        """Send the remaining spans. May take long; the last call."""
        ...


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
    paused: bool = False
    """Requests are accepted and wait until /continue_generation."""
    released: set[str] = field(default_factory=set[str])
    """Memory that /release_memory_occupation has given back; requests wait for all of it."""
    dead: str = ""
    open: OpenRequests = field(default_factory=OpenRequests)
    sessions: Sessions = field(default_factory=Sessions)
    probe: SharedProbe = field(default_factory=SharedProbe)
    version: str = field(default_factory=own_version)
    storage: Storage = field(init=False)
    adapters: AdapterNames = field(init=False)
    """Those that requests may name."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    metrics: Metrics | None = None
    """None where nothing is counted."""
    labels: "RequestScope | None" = None
    """None where requests bring no labels for what is counted."""
    recent: Recent | None = None
    """None where nothing is kept for the loss of an engine."""
    recordings: Callable[[], dict[int, Callable[[], bytes]]] = dict
    """By replica, what the flight recorder of its engine holds; none before the start."""
    traces: "Tracing | None" = None
    """None where nothing is traced."""
    keys: Keys = field(init=False)
    tool_servers: ToolServers = field(default_factory=ToolServers)
    """Set once, before the model is loaded."""

    def __post_init__(self) -> None:
        self.storage = Storage(storage_path(self.config.server))
        self.keys = Keys(self.config.server.api_key, self.config.server.api_key_file)
        self.adapters = AdapterNames.of(self.config.lora)

    @property
    def around(self) -> "list[RequestScope]":
        """What requests that may make something run within."""
        traced = None if self.traces is None else self.traces.context
        return [each for each in (traced, self.labels) if each is not None]

    def has_begun(self, work: "asyncio.Task[None]") -> bool:
        """Whether requests of this handler went to the engine, whose end is logged there."""
        return self.open.has_held(work)

    def trouble(self) -> str:
        """Why no request can be admitted; "" when one can."""
        if self.dead:
            return f"the engine has died: {self.dead}"
        if self.draining:
            return "the server is shutting down"
        if self.service is None:
            return "the server is starting"
        return self.service.client.health().reason

    def admit(self) -> Service:
        """The service for a request that needs a step, or RequestError 503 that says why not."""
        service = self.started()
        health = service.client.health()
        if health.reason:
            raise unavailable(
                health.reason, "engine_stuck" if health.ready else "engine_restarting"
            )
        return service

    def take_in(self, request: str) -> Service:
        """As `admit`, for a request that has to wait in the queue: nothing of it need be read to
        know that this is full. Whoever counts requests is told.

        Args:
            request: the id under which it is told.
        """
        service = self.admit()
        try:
            service.client.refuse_if_full()
        except RequestError as error:
            tell_refused(service.meters, RequestId(request), error.code)
            raise
        return service

    def started(self) -> Service:
        """The service, also while its engine is stuck; RequestError 503 when there is none."""
        if self.dead:
            raise unavailable(f"the engine has died: {self.dead}", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down; send the request elsewhere", "draining")
        if self.service is None:
            raise unavailable("the model is still loading; ask /readyz for when", "starting")
        return self.service

    def retry_after_s(self) -> int:
        """Seconds until the requests that wait now have ended, at the pace of late."""
        if self.service is None:
            return UNKNOWN_S
        alive = [replica for replica in self.service.client.replicas() if replica.alive]
        waiting = sum(replica.stats.waiting for replica in alive)
        return wait_s(waiting, sum(replica.ends_per_s for replica in alive))

    @property
    def served_name(self) -> str:
        return self.config.model.served_name or self.config.model.source


Handler = Callable[["HttpExchange", ServerState], Coroutine[Any, Any, None]]
"""Handles the requests of one route."""
