"""EngineClient: the front's half of the link to one engine.

Sorts events into one bounded stream per request, matches replies to calls, and knows whether the
engine is alive, ready and making progress. Knows no text and no HTTP. Every stream ends exactly
once, also when the engine dies or nobody reads. Whoever keeps the engine up may bring another one
in the place of a lost one (`listen`, `revive`): it gets the requests of which nothing was answered,
and is told what its predecessor was told to be.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import BanyanError, DeviceError, RequestError
from banyan.base.ids import RequestId
from banyan.base.log import logger
from banyan.engine_client.connection import Line
from banyan.engine_client.desired_state import ATTACH, Standing
from banyan.engine_client.event_stream import EventStream, OpenStreams
from banyan.engine_client.throughput_estimate import Pace
from banyan.messages.events import Event, Failed, Fatal, Finished, Ready, Reply, Stats, Tokens
from banyan.messages.requests import Abort, Control, Generate, Message, StopAt
from banyan.messages.transport import FrontLink
from banyan.messages.wire import WireError, message_codec

log = logger(__name__)

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
    """One engine, by its number: what it said when it was ready, and its latest heartbeat.
    `alive` = it can admit requests."""

    rank: int
    alive: bool
    ready: Ready | None
    stats: Stats
    ends_per_s: float = 0.0
    """Requests that have ended lately; 0 = not known yet."""


class Engines(Protocol):
    """What the front needs of whoever generates: one engine, or several behind one face."""

    @property
    def stats(self) -> Stats: ...
    @property
    def stats_at_s(self) -> float: ...
    @property
    def num_open(self) -> int: ...
    async def ready(self) -> Ready: ...
    def submit(self, generate: Generate) -> EventStream: ...
    def refuse_if_full(self) -> None: ...
    def abort(self, request: RequestId) -> None: ...
    def stop_at(self, request: RequestId, length: int) -> None: ...
    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply: ...
    def health(self) -> Health: ...
    def replicas(self) -> list[Replica]: ...


class Replicas(Engines, Protocol):
    """The same of several engines, which can also be asked one by one."""

    async def ask(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> list[tuple[int, Reply]]: ...


class EngineClient:
    """One engine as the front sees it. All calls from one event loop.

    Args:
        link: the front's end; closed by `close`.
        origin: which front this is, when an engine serves several.
        heartbeat_timeout_s: silence of the engine or of one of its ranks after which it counts as
            stuck, and its streams end.
        max_open: requests that may be open at once, running or waiting; 0 = any number.
        max_queued: waiting requests before the engine refuses any other; 0 = it may not.
        watchdog_s: age of a step after which it does; no silence may be longer.
        is_kept_up: another engine will come in the place of a lost one, or `give_up` be called;
            one that is stuck counts as lost.
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
        max_queued: int = 0,
        is_kept_up: bool = False,
    ) -> None:
        self.stats = Stats()
        """The latest heartbeat."""
        self.stats_at_s = 0.0
        """When it came; 0 before the first."""
        self.streams = OpenStreams()
        """By request, until the engine's last word on it: an id that is still being aborted
        cannot be taken again, else the old end would end the new request."""
        self.remedy = ""
        """What is being done about the loss of the engine; for people."""
        self._line = Line(link, self._deliver, self.engine_lost)
        self._watching: asyncio.Task[None] | None = None
        self._pace = Pace()
        self._clock = clock or WallClock()
        self._origin = origin
        self._heartbeat_timeout_s = min(heartbeat_timeout_s, watchdog_s)
        self._watchdog_s = watchdog_s
        self._max_waiting_events = max_waiting_events
        self._max_open = max_open
        self._max_queued = max_queued
        self._is_kept_up = is_kept_up
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._codec = message_codec()
        self._sendable_text = ""
        """The constraint of the latest request, which a frame can hold."""
        self._ready: Ready | None = None
        self.standing = Standing()
        """What the engine has been told to be, and the next one must be."""
        self._lost = ""
        """Why the engine is gone; "" while it is not."""
        self.exit_code = DeviceError.exit_code
        """What the server should end with if the engine stays lost."""
        self.is_stuck = False
        """The lost engine may still be there, and does not go on."""
        self._is_reviving = False
        self._hello: Ready | None = None
        """What the engine said of itself; it admits requests when `_ready` is that."""
        self._decided = asyncio.Event()
        """Ready has come, or the engine is lost."""
        self._is_lost = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen. The engine may start before or after."""
        self._line.open()
        every_s = min(_MAX_LOOK_S, self._heartbeat_timeout_s / _LOOKS)
        watch = _watch(self._look, every_s)
        self._watching = asyncio.create_task(watch, name="engine-client-watch")

    async def close(self) -> None:
        """End every stream and call, stop listening, release the link."""
        self.give_up("The server is shutting down.")
        if self._watching is not None:
            self._watching.cancel()
        self._line.close()

    async def ready(self) -> Ready:
        """Wait until the engine can admit requests; BanyanError when it dies instead."""
        await self._decided.wait()
        if self._lost or self._hello is None:
            raise BanyanError.told(self._lost, self.exit_code)
        return self._hello

    async def lost(self) -> str:
        """Wait until the engine is gone, in death or by its own word; returns why."""
        await self._is_lost.wait()
        return self._lost

    def submit(self, generate: Generate) -> EventStream:
        """Start a request; RequestError when the engine cannot take it or its id is in use."""
        self._refuse_unless_ready()
        if generate.request in self.streams:
            raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
        if self._max_open and len(self.streams) >= self._max_open:
            raise RequestError(
                f"{len(self.streams)} sequences are open; at most {self._max_open} are taken",
                status=429,
                code="too_many_requests",
                hint="Try again later",
            )
        self.refuse_if_full()
        self._refuse_unless_sendable(generate)
        stream = EventStream(self, generate, self._max_waiting_events, self._is_kept_up)
        self.streams.add(stream, is_queued=not generate.grammar)
        self._line.post(generate)
        return stream

    def refuse_if_full(self) -> None:
        """RequestError 503 when the engine would refuse whatever it is sent now: so many requests
        are open that its queue is full even if all places are taken (scheduler/queue_limits.py).
        Spares it the work, and whoever calls this first the reading of the request."""
        if not self._max_queued or self._ready is None:
            return
        if self.streams.num_queued >= self._ready.max_running + self._max_queued:
            raise RequestError("The request queue is full.", status=503, code="queue_full")

    def take_over(self, stream: EventStream) -> None:
        """Run a request of which another engine has answered nothing, once."""
        generate, stream.unanswered = stream.unanswered, None
        assert generate is not None
        stream.owner = self
        self.streams.add(stream, is_queued=not generate.grammar)
        self._line.post(generate)

    def abort(self, request: RequestId) -> None:
        """End a request at any state; its stream ends with Finished("abort"). Unknown: no-op."""
        if self._ready is None:  # no engine has it
            if stream := self.streams.remove(request):
                stream.put(Finished(request, "abort", stream.num_prompt, 0, 0))
        elif request in self.streams:
            self.streams.told_to_end(request)
            self._line.post(Abort(request))

    def stop_at(self, request: RequestId, length: int) -> None:
        """Keep `length` output tokens and finish; its stream ends with Finished("stop")."""
        if request in self.streams:
            self.streams.told_to_end(request)
            self._line.post(StopAt(request, length))

    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply:
        """Carry out an administrative verb; RequestError 504 when no answer comes in time."""
        self._refuse_unless_ready()
        reply = await self._call(verb, timeout_s, args)
        if reply.ok:
            self.standing.take(verb, args)
        return reply

    async def _call(
        self, verb: str, timeout_s: float, args: Mapping[str, str | int | float | bool]
    ) -> Reply:
        call = next(self._call_numbers)
        message = Control(call, verb, self._origin, dict(args))
        self._refuse_unless_sendable(message)
        answer = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        self._line.post(message)
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

    def engine_lost(
        self,
        reason: str,
        exit_code: int = DeviceError.exit_code,
        code: str = "engine_unavailable",
    ) -> None:
        """The engine is gone (from the supervisor, or its own Fatal): end all that waits for it,
        but for requests that the next one can run."""
        if self._lost:
            return
        self._lost, self.exit_code = reason or "The engine ended.", exit_code
        self._ready = self._hello = None
        self._decided.set()
        self._is_lost.set()
        answered = [stream for stream in self.streams.all() if stream.unanswered is None]
        self.streams.end(answered, self._lost, code)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_gone(self.remedy or self._lost))

    def give_up(self, reason: str) -> None:
        """No other engine will come."""
        self._is_kept_up, self.remedy = False, ""
        self.engine_lost(reason)
        self._lost = reason
        self.streams.end(self.streams.all(), reason, "engine_unavailable")

    async def listen(self, link: FrontLink) -> None:
        """Take the next engine, behind `link`, for the lost one; it admits nothing before
        `revive`."""
        self._line.close()
        self._line = Line(link, self._deliver, self.engine_lost)
        self.stats, self.stats_at_s = Stats(), 0.0
        self._lost, self.is_stuck, self._is_reviving = "", False, True
        self._decided.clear()
        self._is_lost.clear()
        self._line.open()

    async def revive(self, timeout_s: float) -> None:
        """Wait for the next engine, make it what the lost one was, and give it the requests that
        wait.

        Args:
            timeout_s: for each thing that the engine is told to do before it admits requests.

        Raises:
            BanyanError: it is lost as well, or does not do what it is told.
        """
        try:
            await self.ready()
            told = Standing()
            while (order := self.standing.lacking(told)) is not None:
                verb, args = order
                reply = await self._call(verb, timeout_s, args)
                if not reply.ok and verb != ATTACH:
                    raise DeviceError(f"the new engine could not {verb}: {reply.text}")
                if not reply.ok:
                    log.warning("the new engine goes on without a store: %s", reply.text)
                told.take(verb, args)
            await self.ready()
        finally:
            self._is_reviving = False
        self._ready, self.remedy = self._hello, ""
        for stream in self.streams.release():
            self.take_over(stream)

    def health(self) -> Health:
        if self._lost:
            return Health(False, False, False, self.remedy or self._lost)
        if self._ready is None:
            return Health(True, False, False, self.remedy or "The engine is starting.")
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
        is_alive = self._ready is not None
        return [Replica(0, is_alive, self._ready, self.stats, self._pace.per_s)]

    @property
    def num_open(self) -> int:
        """Requests whose end has not come yet."""
        return len(self.streams)

    @property
    def open_tokens(self) -> int:
        """Prompts of the open requests, and the most that may follow them."""
        return self.streams.tokens

    def _refuse_unless_ready(self) -> None:
        if self._lost:
            raise _gone(self.remedy or self._lost)
        if self._ready is None:
            raise RequestError(self.health().reason, status=503, code="engine_starting")

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

    def _look(self, was_stuck: bool) -> bool:
        """Whether the engine is stuck; end what is open once it is. It has to be so at two looks in
        a row: after a pause of this process its heartbeats may still wait to be read."""
        health = self.health()
        is_stuck = health.ready and not health.progressing
        if is_stuck and was_stuck and self._is_kept_up:
            self.is_stuck = True
            self.engine_lost(f"The engine was stuck. {health.reason}", code="engine_stuck")
        elif is_stuck and was_stuck:
            self._fail_open(health.reason)
        return is_stuck

    def _fail_open(self, reason: str) -> None:
        """Fail every open request. Ids stay taken until the engine, should it go on, lets go."""
        ended = [stream for stream in self.streams.all() if not stream.is_complete]
        for stream in ended:
            stream.put(Failed(stream.request, 503, reason, "engine_stuck"))
            self.abort(stream.request)
        if ended:
            log.error("the engine is stuck: ended %d requests: %s", len(ended), reason)

    def _deliver(self, event: Event) -> None:
        if self._lost:  # what it says now may be of requests that another one gets
            return
        match event:
            case Tokens():
                if stream := self.streams.find(event.request):
                    stream.put(event)
            case Finished() | Failed():
                if stream := self.streams.remove(event.request):
                    stream.put(event)
            case Reply():
                answer = self._calls.get(event.call)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case Stats():
                self.stats = event
                self.stats_at_s = self._clock.now()
                self._pace.saw(event.finished, event.waiting, self.stats_at_s)
            case Ready():
                self._hello = event
                if not self._is_reviving:
                    self._ready = event
                self.stats_at_s = self._clock.now()
                self._decided.set()
            case Fatal():
                self.engine_lost(event.text, event.exit_code)


async def _watch(look: Callable[[bool], bool], every_s: float) -> None:
    """Look again and again, and tell each look what the one before found."""
    found = False
    while True:
        await asyncio.sleep(every_s)
        try:
            found = look(found)
        except Exception:  # or nobody would look any more, and nobody would know
            log.exception("a look at the engine failed")


def _gone(reason: str) -> RequestError:
    return RequestError(reason, status=503, code="engine_unavailable")
