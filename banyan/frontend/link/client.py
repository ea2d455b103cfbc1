"""EngineClient: the front's half of the link to one engine.

Sorts events into one bounded stream per request, matches replies to calls, and knows whether the
engine is alive, ready and making progress. Knows no text and no HTTP. Every stream ends exactly
once, also when the engine dies or nobody reads.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import BanyanError, DeviceError, RequestError
from banyan.base.ids import RequestId
from banyan.base.log import logger
from banyan.messages.events import Event, Failed, Fatal, Finished, Ready, Reply, Stats, Tokens
from banyan.messages.link import FrontLink
from banyan.messages.requests import Abort, Control, Generate, Message, StopAt
from banyan.messages.wire import WireError, message_codec

log = logger(__name__)

StreamEvent = Tokens | Finished | Failed

TOKEN_BYTES = 4
_LOOKS = 8
"""How often the front looks at its engine within the deadline of a heartbeat."""
_MAX_LOOK_S = 1.0
MAX_WAITING_EVENTS = 4096
"""Events that a stream keeps for a reader who does not read; one more aborts its request."""


@dataclass(frozen=True)
class Health:
    """What the front knows of its engine. `reason` says why not, "" when all is well."""

    alive: bool
    ready: bool
    progressing: bool
    reason: str = ""


@dataclass(frozen=True)
class Replica:
    """One engine, by its number: what it said when it was ready, and its latest heartbeat."""

    rank: int
    alive: bool
    ready: Ready | None
    stats: Stats


class Engines(Protocol):
    """What the front needs of whoever generates: one engine, or several behind one face."""

    @property
    def stats(self) -> Stats: ...
    @property
    def stats_at_s(self) -> float: ...
    @property
    def num_open(self) -> int: ...
    async def ready(self) -> Ready: ...
    def submit(self, generate: Generate) -> "EventStream": ...
    def abort(self, request: RequestId) -> None: ...
    def stop_at(self, request: RequestId, length: int) -> None: ...
    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply: ...
    def health(self) -> Health: ...
    def replicas(self) -> list[Replica]: ...


class EventStream:
    """The events of one request, in order; ends after its Finished or Failed.

    The caller owns the stream and closes it; closing before the end aborts the request.
    """

    def __init__(
        self, client: "EngineClient", request: RequestId, tokens: int, max_waiting: int
    ) -> None:
        self.request = request
        self.tokens = tokens
        """Prompt, and the most that may follow."""
        self._client = client
        self._max_waiting = max_waiting
        self._waiting: deque[StreamEvent] = deque()
        self._arrived = asyncio.Event()
        self.is_complete = False
        """The last event has been put."""
        self._is_closed = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> StreamEvent:
        if not await self._has_event():
            raise StopAsyncIteration
        return self._waiting.popleft()

    async def batch(self) -> list[StreamEvent]:
        """Every event that waits, at least one; [] after the end."""
        if not await self._has_event():
            return []
        events = list(self._waiting)
        self._waiting.clear()
        return events

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the request; it is aborted if it still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.clear()
        self._arrived.set()
        if not self.is_complete:
            self._client.abort(self.request)

    def put(self, event: StreamEvent) -> None:
        """Take in an event (the client's side); one too many ends the stream and its request."""
        if self.is_complete or self._is_closed:
            return
        self._waiting.append(event)
        self.is_complete = not isinstance(event, Tokens)
        if not self.is_complete and len(self._waiting) > self._max_waiting:
            self._waiting[-1] = Failed(
                self.request,
                408,
                f"The reader is {self._max_waiting} events behind; the request was cancelled.",
                "slow_reader",
            )
            self.is_complete = True
            self._client.abort(self.request)
        self._arrived.set()

    async def _has_event(self) -> bool:
        while not self._waiting:
            if self.is_complete or self._is_closed:
                return False
            self._arrived.clear()
            await self._arrived.wait()
        return True


class EngineClient:
    """One engine as the front sees it. All calls from one event loop.

    Args:
        link: the front's end; closed by `close`.
        origin: which front this is, when an engine serves several.
        heartbeat_timeout_s: silence of the engine or of one of its ranks after which it counts as
            stuck, and its streams end.
        max_open: requests that may be open at once, running or waiting; 0 = any number.
        watchdog_s: age of a step after which it does; no silence may be longer.
    """

    def __init__(
        self,
        link: FrontLink,
        *,
        clock: Clock | None = None,
        origin: str = "",
        heartbeat_timeout_s: float = 20.0,
        watchdog_s: float = 300.0,
        max_waiting_events: int = MAX_WAITING_EVENTS,
        max_open: int = 0,
    ) -> None:
        self.stats = Stats()
        """The latest heartbeat."""
        self.stats_at_s = 0.0
        """When it came; 0 before the first."""
        self.open_tokens = 0
        """Prompts of the open requests, and the most that may follow them."""
        self._link = link
        self._clock = clock or WallClock()
        self._origin = origin
        self._heartbeat_timeout_s = min(heartbeat_timeout_s, watchdog_s)
        self._watchdog_s = watchdog_s
        self._max_waiting_events = max_waiting_events
        self._max_open = max_open
        self._streams: dict[RequestId, EventStream] = {}
        """By request, until the engine's last word on it: an id that is still being aborted
        cannot be taken again, else the old end would end the new request."""
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._codec = message_codec()
        self._sendable_text = ""
        """The constraint of the latest request, which a frame can hold."""
        self._outbox: list[Message] = []
        self._has_mail = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: Ready | None = None
        self._lost = ""
        """Why the engine is gone; "" while it is not."""
        self._exit_code = DeviceError.exit_code
        self._decided = asyncio.Event()
        """Ready has come, or the engine is lost."""
        self._is_lost = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen. The engine may start before or after."""
        self._tasks = [
            asyncio.create_task(self._guard(self._send_all), name="engine-client-send"),
            asyncio.create_task(self._guard(self._receive_all), name="engine-client-receive"),
            asyncio.create_task(self._guard(self._watch), name="engine-client-watch"),
        ]

    async def close(self) -> None:
        """End every stream and call, stop listening, release the link."""
        self.engine_lost("The server is shutting down.")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._link.close()

    async def ready(self) -> Ready:
        """Wait until the engine can admit requests; BanyanError when it dies instead."""
        await self._decided.wait()
        if self._ready is None:
            raise BanyanError.told(self._lost, self._exit_code)
        return self._ready

    async def lost(self) -> str:
        """Wait until the engine is gone, in death or by its own word; returns why."""
        await self._is_lost.wait()
        return self._lost

    def submit(self, generate: Generate) -> EventStream:
        """Start a request; RequestError when the engine cannot take it or its id is in use."""
        self._refuse_unless_ready()
        if generate.request in self._streams:
            raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
        if self._max_open and len(self._streams) >= self._max_open:
            raise RequestError(
                f"{len(self._streams)} sequences are open; at most {self._max_open} are taken",
                status=429,
                code="too_many_requests",
                hint="Try again later",
            )
        self._refuse_unless_sendable(generate)
        tokens = len(generate.tokens) // TOKEN_BYTES + generate.sampling.max_new_tokens
        stream = EventStream(self, generate.request, tokens, self._max_waiting_events)
        self._streams[generate.request] = stream
        self.open_tokens += tokens
        self._post(generate)
        return stream

    def abort(self, request: RequestId) -> None:
        """End a request at any state; its stream ends with Finished("abort"). Unknown: no-op."""
        if request in self._streams:
            self._post(Abort(request))

    def stop_at(self, request: RequestId, length: int) -> None:
        """Keep `length` output tokens and finish; its stream ends with Finished("stop")."""
        if request in self._streams:
            self._post(StopAt(request, length))

    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply:
        """Carry out an administrative verb; RequestError 504 when no answer comes in time."""
        self._refuse_unless_ready()
        call = next(self._call_numbers)
        message = Control(call, verb, self._origin, dict(args))
        self._refuse_unless_sendable(message)
        answer = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        self._post(message)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise RequestError(
                f"The engine did not answer {verb!r} within {timeout_s:g} s",
                status=504,
                code="engine_timeout",
            ) from None
        finally:
            del self._calls[call]

    def engine_lost(self, reason: str, exit_code: int = DeviceError.exit_code) -> None:
        """The engine is gone (from the supervisor, or its own Fatal): end all that waits for it."""
        if self._lost:
            return
        self._lost, self._exit_code = reason or "The engine ended.", exit_code
        self._decided.set()
        self._is_lost.set()
        streams, self._streams = self._streams, {}
        for request, stream in streams.items():
            stream.put(Failed(request, 503, self._lost, "engine_unavailable"))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def health(self) -> Health:
        if self._lost:
            return Health(False, False, False, self._lost)
        if self._ready is None:
            return Health(True, False, False, "The engine is starting.")
        silence_s = self._clock.now() - self.stats_at_s
        if silence_s > self._heartbeat_timeout_s:
            return Health(True, True, False, f"No heartbeat for {silence_s:.1f} s.")
        if self.stats.silent_s > self._heartbeat_timeout_s:
            rank, silent_s = self.stats.silent_rank, self.stats.silent_s
            return Health(True, True, False, f"Rank {rank} has not run for {silent_s:.1f} s.")
        if self.stats.step_age_s > self._watchdog_s:
            age_s = self.stats.step_age_s
            return Health(True, True, False, f"A step has been running for {age_s:.1f} s.")
        return Health(True, True, True)

    def replicas(self) -> list[Replica]:
        """Itself alone."""
        return [Replica(0, not self._lost, self._ready, self.stats)]

    @property
    def num_open(self) -> int:
        """Requests whose end has not come yet."""
        return len(self._streams)

    def has_open(self, request: RequestId) -> bool:
        return request in self._streams

    def _refuse_unless_ready(self) -> None:
        if self._lost:
            raise self._gone()
        if self._ready is None:
            raise RequestError("The engine is starting.", status=503, code="engine_starting")

    def _refuse_unless_sendable(self, message: Message) -> None:
        """What no frame can hold is the fault of its sender, and must not reach the outbox, where
        it would end the link for everybody."""
        checked = message
        if isinstance(message, Generate) and message.grammar == self._sendable_text:
            checked = msgspec.structs.replace(message, grammar="")  # of many sequences, once
        try:
            self._codec.check(checked)
        except WireError as error:
            raise RequestError(f"The request cannot be sent to the engine: {error}") from None
        if isinstance(message, Generate):
            self._sendable_text = message.grammar

    def _gone(self) -> RequestError:
        return RequestError(self._lost, status=503, code="engine_unavailable")

    def _post(self, message: Message) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """A task that fails takes the engine's place in the streams, never silently."""
        try:
            await work()
        except Exception as error:
            log.exception("the link to the engine failed")
            self.engine_lost(f"The link to the engine failed: {type(error).__name__}: {error}")

    async def _send_all(self) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            messages, self._outbox = self._outbox, []
            await self._link.send(messages)

    async def _receive_all(self) -> None:
        while True:
            for event in await self._link.receive():
                self._deliver(event)

    async def _watch(self) -> None:
        """End what is open once the engine is stuck. It has to be so at two looks in a row: after
        a pause of this process its heartbeats may still wait to be read."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(_MAX_LOOK_S, self._heartbeat_timeout_s / _LOOKS))
            health = self.health()
            is_stuck = health.ready and not health.progressing
            if is_stuck and was_stuck:
                self._end_streams(health.reason)
            was_stuck = is_stuck

    def _end_streams(self, reason: str) -> None:
        """Fail every open request. Ids stay taken until the engine, should it go on, lets go."""
        ended = [stream for stream in self._streams.values() if not stream.is_complete]
        for stream in ended:
            stream.put(Failed(stream.request, 503, reason, "engine_stuck"))
            self.abort(stream.request)
        if ended:
            log.error("the engine is stuck: ended %d requests: %s", len(ended), reason)

    def _deliver(self, event: Event) -> None:
        match event:
            case Tokens():
                if stream := self._streams.get(event.request):
                    stream.put(event)
            case Finished() | Failed():
                if stream := self._streams.pop(event.request, None):
                    self.open_tokens -= stream.tokens
                    stream.put(event)
            case Reply():
                answer = self._calls.get(event.call)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case Stats():
                self._heard(event)
            case Ready():
                self._ready = event
                self.stats_at_s = self._clock.now()
                self._decided.set()
            case Fatal():
                self.engine_lost(event.text, event.exit_code)

    def _heard(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at_s = self._clock.now()
