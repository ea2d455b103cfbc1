"""The state of a server: its configuration, the service once it is ready, and the open requests.

There is one `ServerState` per process. The listeners and handlers get it as an argument.
"""

import asyncio
import contextlib
import math
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER
from banyan.base.ids import RequestId
from banyan.base.install import VERSION
from banyan.chat_template.named_templates import FillIn
from banyan.chat_template.template import Chat
from banyan.config.schema import Config
from banyan.engine_client.client import Replicas
from banyan.engine_client.data_parallel import LoadHistory
from banyan.engine_client.metrics_observer import MetricsExporter, MetricsObserver, report_refused
from banyan.engine_client.request_log import EndedRequests, Recent
from banyan.hub.remote_instance import SeedFiles, WeightSender
from banyan.media.preparation import MediaService
from banyan.messages.events import Ready
from banyan.model_config.model_config import ModelConfig
from banyan.parsers.choice import Parsers
from banyan.parsers.tool_calls.base import CallTag
from banyan.requests.generation import Generator
from banyan.requests.lora_names import AdapterNames
from banyan.requests.request_spec import RequestContext, RequestSpec, TracedCall
from banyan.requests.sampling_params import NATIVE_DEFAULTS, DrawSeed, Limits, fresh_seed
from banyan.requests.sessions import Sessions
from banyan.server.errors import RETRY_AFTER_S, unavailable
from banyan.server.http.auth import Keys, TenantSigner
from banyan.server.store.responses import ResponseStore
from banyan.server.store.storage import Storage, storage_path
from banyan.server.tool_servers.base import ToolServers
from banyan.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from banyan.server.http.exchange import HttpExchange

LEAST_WAIT_S, MOST_WAIT_S = 1, 600
"""Bounds of Retry-After."""

PROBE_HOLDS_S = 1.0
"""How long a passed health check counts for later callers."""


_NO_WEIGHTS = "weights have not been sent yet: POST /update_weights_from_disk"


@dataclass(frozen=True)
class Service:
    """What handlers use once the engine is ready."""

    model_config: ModelConfig
    ready: Ready
    client: Replicas
    generator: Generator
    limits: Limits
    tokenizer: Tokenizer | None
    """None = token ids only (--skip-tokenizer-init)."""
    chat: Chat | None
    """None = the model has no chat template."""
    parsers: Parsers = field(default_factory=Parsers)
    """Parsers of reasoning and tool calls in answers."""
    media: MediaService | None = None
    """None = the model takes text only."""
    fill_in: FillIn | None = None
    """The fill-in-the-middle format; None = `suffix` is refused."""
    native_defaults: Mapping[str, object] = field(default_factory=lambda: NATIVE_DEFAULTS)
    """Defaults of sampling fields."""
    chat_defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of sampling fields for chat, with those that the model recommends. `max_new_tokens`
    None = as many as fit."""
    draw_seed: DrawSeed = fresh_seed
    metrics_observers: Sequence[MetricsObserver] = ()
    """Observers of requests that are refused before they reach `generator`, which has its own."""

    @property
    def tool_tag(self) -> CallTag | None:
        """The tag of tool calls in text, if the chat template cannot show tools.

        None if it can, or if no parser would find the calls.
        """
        if self.chat is None or self.chat.template.takes_tools or self.parsers.tools is None:
            return None
        return self.parsers.tools.tag

    def required_tokenizer(self) -> Tokenizer:
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
    """Open requests by id, with the credential that made each."""

    def __init__(self) -> None:
        self._live: dict[RequestId, bytes] = {}
        self._holders: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()
        """Tasks that have sent requests to the engine."""
        self._dropped = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def holding(self, requests: Sequence[RequestSpec], owner: bytes) -> Iterator[None]:
        """Register the ids of `requests` for the block; RequestError 400 if one is in use."""
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
        """Whether this task has sent requests to the engine."""
        return work in self._holders

    def sequences_of(self, rid: str) -> list[RequestId]:
        """The request with this id, or its sequences: their ids are `rid`_NUMBER."""
        return [r for r in self._live if r == rid or _SEQUENCE.sub("", r) == rid]

    def owned_by(self, owner: bytes) -> list[RequestId]:
        """The requests of a credential."""
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

    def context(self, call: TracedCall) -> AbstractContextManager[None]:
        """The span of one request, in the caller's trace if its headers name one."""
        ...

    def watch(self, generator: Generator) -> Generator:
        """`generator` with a span for each sequence, and within it one for each phase."""
        ...

    def close(self) -> None:
        """Send the remaining spans. May take long; the last call."""
        ...


@dataclass
class ServerState:
    """The state that all handlers share.

    `service` is set once. `dead` and `draining` are never reset.
    """

    config: Config
    started_s: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    service: Service | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Start-up phase -> seconds, in order."""
    draining: bool = False
    paused: bool = False
    """Requests are accepted and wait until /continue_generation."""
    released: set[str] = field(default_factory=set[str])
    """Memory that /release_memory_occupation has released; requests wait until it is empty."""
    awaits_weights: bool = field(init=False)
    """No weights have been sent yet (--checkpoint-engine-wait-weights-before-ready)."""
    dead: str = ""
    open: OpenRequests = field(default_factory=OpenRequests)
    sessions: Sessions = field(default_factory=Sessions)
    probe: SharedProbe = field(default_factory=SharedProbe)
    version: str = VERSION
    storage: Storage = field(init=False)
    adapters: AdapterNames = field(init=False)
    """The LoRA adapters that requests may name."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    metrics: MetricsExporter | None = None
    """None without --enable-metrics."""
    seed_files: SeedFiles = field(default_factory=SeedFiles)
    """The files of the loaded weights, for new servers."""
    weight_senders: dict[str, WeightSender] = field(default_factory=dict[str, WeightSender])
    """By group, until they have sent; ENGINE is the one that stays."""
    labels: "Callable[[RequestContext], AbstractContextManager[None]] | None" = None
    """Sets the metric labels that a request brings; None = there are none."""
    recent: Recent | None = None
    """The latest requests, for crash dumps; None without --crash-dump-folder."""
    ended: EndedRequests = field(default_factory=EndedRequests)
    """Filled while the server has the console."""
    history: LoadHistory = field(init=False)
    recordings: Callable[[], dict[int, Callable[[], bytes]]] = dict
    """Replica -> reads the flight recorder of its engine; empty before the start."""
    traces: "Tracing | None" = None
    """None without --enable-trace."""
    keys: Keys = field(init=False)
    signer: TenantSigner | None = None
    """Checks the callers that a router names; None without BANYAN_DIST_SECRET."""
    tool_servers: ToolServers = field(default_factory=ToolServers)
    """Set once, before the model is loaded."""

    def __post_init__(self) -> None:
        self.awaits_weights = self.config.model.waits_for_weights
        self.storage = Storage(storage_path(self.config.server))
        self.history = LoadHistory(self.config.cache.page_size)
        self.keys = Keys(self.config.server.api_key, self.config.server.api_key_file)
        self.adapters = AdapterNames.of(self.config.lora)

    def request_scopes(self, call: TracedCall) -> list[AbstractContextManager[None]]:
        """To enter around a request with a body: its trace span and its metric labels."""
        scopes: list[AbstractContextManager[None]] = []
        if self.traces is not None:
            scopes.append(self.traces.context(call))
        if self.labels is not None:
            scopes.append(self.labels(call.context))
        return scopes

    def has_begun(self, work: "asyncio.Task[None]") -> bool:
        """Whether this handler has sent requests to the engine, which logs their end."""
        return self.open.has_held(work)

    def not_ready_reason(self) -> str:
        """Why no request can be admitted; "" if requests are admitted."""
        if self.dead:
            return f"the engine has died: {self.dead}"
        if self.draining:
            return "the server is shutting down"
        if self.service is None:
            return "the server is starting"
        return self.service.client.health().reason or (_NO_WEIGHTS if self.awaits_weights else "")

    def admit(self) -> Service:
        """The service for a request that needs the engine.

        Raises:
            RequestError: 503 with the reason why there is none.
        """
        service = self.started()
        health = service.client.health()
        if health.reason:
            raise unavailable(
                health.reason, "engine_stuck" if health.ready else "engine_restarting"
            )
        return service

    def admit_with_weights(self) -> Service:
        """Like `admit`, for a request that computes something."""
        service = self.admit()
        if self.awaits_weights:
            raise unavailable(_NO_WEIGHTS, "no_weights")
        return service

    def admit_to_queue(self, request: str) -> Service:
        """Like `admit`, for a request that will be queued: refuse it before it is read if the queue
        is full, and report that to the metrics.

        Args:
            request: its id.
        """
        service = self.admit_with_weights()
        try:
            service.client.refuse_if_full(CALLER.get())
        except RequestError as error:
            report_refused(service.metrics_observers, RequestId(request), error.code)
            raise
        return service

    def started(self) -> Service:
        """The service, even if the engine is stuck; RequestError 503 if there is none."""
        if self.dead:
            raise unavailable(f"the engine has died: {self.dead}", "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down; send the request elsewhere", "draining")
        if self.service is None:
            raise unavailable("the model is still loading; ask /readyz for when", "starting")
        return self.service

    def retry_after_s(self) -> int:
        """Seconds until the queued requests have ended, at the current throughput."""
        if self.service is None:
            return RETRY_AFTER_S
        alive = [replica for replica in self.service.client.replicas() if replica.alive]
        waiting = sum(replica.stats.waiting for replica in alive)
        return wait_s(waiting, sum(replica.ends_per_s for replica in alive))

    @property
    def served_name(self) -> str:
        return self.config.model.served_name or self.config.model.source


def wait_s(waiting: int, per_s: float) -> int:
    """Whole seconds until the waiting requests have finished; RETRY_AFTER_S without an estimate."""
    if per_s <= 0:
        return RETRY_AFTER_S
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(waiting / per_s)))


Handler = Callable[["HttpExchange", ServerState], Coroutine[Any, Any, None]]
"""Handles the requests of one route."""
