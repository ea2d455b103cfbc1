"""EngineClient: the API process's side of the link to one engine.

Sorts events into one bounded stream per request, matches replies to calls, and tracks whether the
engine is alive, ready and making progress. Every stream ends exactly once, even if the engine
dies or nobody reads. The supervisor may replace a lost engine (`listen`, `revive`): the new one
gets the requests without output and is brought to the desired state.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import BanyanError, DeviceError, RequestError
from banyan.base.ids import RequestId
from banyan.base.log import logger
from banyan.engine_client.event_stream import EventStream, OpenStreams
from banyan.messages.control_ops import MEMORY_TAGS, USUAL_TAGS, WEIGHTS
from banyan.messages.events import Event, Failed, Fatal, Finished, Ready, Reply, Stats, Tokens
from banyan.messages.frames import WireError, message_codec
from banyan.messages.requests import Abort, Control, Generate, Message, StopAt
from banyan.messages.spans import CONTENT_UNKNOWN
from banyan.messages.transport import FrontLink

LATELY_S = 30.0
"""Length of the measured window, counting only time in which requests waited."""
_APART_S = 0.5
"""Least seconds between two measured heartbeats, unless the queue became empty or filled: each
finished request brings a heartbeat."""

_MOST_DIGESTS = 1024
"""Contents that are taken to be at an engine."""


class ThroughputEstimate:
    """The estimate for one engine, from its heartbeats.

    An idle engine finishes nothing, so its rate says nothing about a queue. The time between two
    heartbeats counts only if requests waited at the earlier one. The window is LATELY_S long.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque()
        """(seconds, requests finished in them)."""
        self._last: tuple[float, int, bool] | None = None
        """(time, finished so far, whether requests waited) of the last heartbeat."""

    def add(self, ended: int, waiting: int, now: float) -> None:
        if self._last is not None:
            at_s, before, was_busy = self._last
            if now - at_s < _APART_S and was_busy == (waiting > 0) and ended >= before:
                return
            if ended < before:
                self._spans.clear()  # a new engine counts from 0
            elif was_busy:
                self._spans.append((now - at_s, ended - before))
                while sum(seconds for seconds, _ in self._spans) > LATELY_S:
                    self._spans.popleft()
        self._last = (now, ended, waiting > 0)

    @property
    def per_s(self) -> float:
        """Requests finished per second; 0 without data."""
        seconds = sum(span for span, _ in self._spans)
        return sum(ended for _, ended in self._spans) / seconds if seconds > 0 else 0.0


log = logger(__name__)

_CHECKS_PER_TIMEOUT = 8
"""Health checks per heartbeat deadline."""
_MAX_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Health:
    """The state of an engine. `reason` explains what is wrong; "" = nothing."""

    alive: bool
    ready: bool
    progressing: bool
    reason: str = ""


@dataclass(frozen=True)
class Replica:
    """One engine: its number, its Ready message and its latest heartbeat. `alive`: it admits
    requests."""

    rank: int
    alive: bool
    ready: Ready | None
    stats: Stats
    ends_per_s: float = 0.0
    """Requests finished per second, lately; 0 = not measured yet."""


class Engines(Protocol):
    """What the API process needs of an engine, or of several as one."""

    @property
    def stats(self) -> Stats: ...
    async def ready(self) -> Ready: ...
    def submit(self, generate: Generate) -> EventStream: ...
    def refuse_if_full(self, caller: bytes = b"") -> None: ...
    def abort(self, request: RequestId) -> None: ...
    def stop_at(self, request: RequestId, length: int) -> None: ...
    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply: ...
    def health(self) -> Health: ...
    def replicas(self) -> list[Replica]: ...


class Replicas(Engines, Protocol):
    """Engines that can also be called one by one."""

    async def ask(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> list[tuple[int, Reply]]: ...


ATTACH = "attach_store"
"""A verb whose failure does not keep a replacement engine from serving."""

Value = str | int | float | bool
VerbCall = tuple[str, Mapping[str, Value]]
"""A verb (engine/control.py) and its arguments."""


class DesiredState:
    """Weights, adapters and store set at run time, released memory, and a pause."""

    def __init__(self) -> None:
        self._weights: Mapping[str, Value] | None = None
        self._released: frozenset[str] = frozenset()
        self._is_paused = False
        self._adapters: dict[str, Mapping[str, Value]] = {}
        """Adapters loaded at run time, by name."""
        self._forgotten: frozenset[str] = frozenset()
        """Adapters of the start that were unloaded."""
        self._store: VerbCall | None = None
        """Arguments of the last attach or detach of a store; None = the store of the start."""
        self._gone: frozenset[str] = frozenset()
        """Adapters loaded at run time and unloaded again."""

    def record(self, verb: str, args: Mapping[str, Value]) -> None:
        """Record a verb that the engine has executed."""
        match verb:
            case "update_weights":
                self._weights = dict(args)
                self._released -= {WEIGHTS}
            case "release_memory":
                self._released |= _tags(args, USUAL_TAGS)
            case "resume_memory":
                self._released -= _tags(args, MEMORY_TAGS)
            case "load_adapter":
                name = str(args.get("name"))
                self._adapters[name] = dict(args)
                self._gone -= {name}
            case "unload_adapter":
                name = str(args.get("name"))
                if self._adapters.pop(name, None) is not None:
                    self._gone |= {name}
                elif (
                    name not in self._gone
                ):  # a data-parallel client repeats what its engines already have
                    self._forgotten |= {name}
            case "attach_store" | "detach_store":
                self._store = verb, dict(args)
            case "pause" | "resume":
                self._is_paused = verb == "pause"
            case _:
                pass

    def lacking(self, reached: "DesiredState") -> VerbCall | None:
        """The next verb for an engine in state `reached`; None when nothing is missing."""
        if (
            self._store is not None and reached._store != self._store
        ):  # none comes after other weights
            is_other = reached._store is None and self._store[0] == ATTACH
            return ("detach_store", {}) if is_other else self._store
        if self._weights is not None and reached._weights != self._weights:
            return "update_weights", self._weights
        if gone := self._forgotten - reached._forgotten:
            return "unload_adapter", {"name": min(gone)}
        for name, args in self._adapters.items():
            if name not in reached._adapters:
                return "load_adapter", args
        if more := self._released - reached._released:
            return "release_memory", {"tags": ",".join(sorted(more))}
        if fewer := reached._released - self._released:
            return "resume_memory", {"tags": ",".join(sorted(fewer))}
        if self._is_paused is not reached._is_paused:
            return "pause" if self._is_paused else "resume", {}
        return None


def _tags(args: Mapping[str, Value], default: Sequence[str]) -> frozenset[str]:
    return frozenset(str(args.get("tags") or ",".join(default)).split(","))


@dataclass(frozen=True)
class ClientLimits:
    """Limits of an EngineClient.

    Attributes:
        heartbeat_timeout_s: silence of the engine or of a rank after which it counts as stuck and
            its streams end.
        watchdog_s: age of a step after which it counts as stuck; bounds heartbeat_timeout_s.
        max_waiting_events: events that a stream buffers for a slow reader; one more aborts its
            request.
        max_open: most open requests, running or waiting; 0 = no limit.
        max_queued: length of the engine's queue; 0 = no limit.
    """

    heartbeat_timeout_s: float = 20.0
    watchdog_s: float = 300.0
    max_waiting_events: int = 4096
    max_open: int = 0
    max_queued: int = 0


class EngineClient:
    """The client of one engine. Call it from one event loop only.

    Args:
        link: this side of the link; `close` closes it.
        origin: name of this client, if an engine serves several.
        is_kept_up: a supervisor replaces a lost engine or calls `give_up`; a stuck engine counts
            as lost.
    """

    def __init__(
        self,
        link: FrontLink,
        limits: ClientLimits | None = None,
        *,
        clock: Clock | None = None,
        origin: str = "",
        is_kept_up: bool = False,
    ) -> None:
        self.stats = Stats()
        """The latest heartbeat."""
        self.stats_at_s = 0.0
        """When it arrived; 0 before the first."""
        self.streams = OpenStreams()
        """Open streams by request, until its last event. An id that is still being aborted
        cannot be reused: the end of the old request would end the new one."""
        self.remedy = ""
        """What is done about a lost engine, as text for people."""
        self._connection = EngineConnection(link, self._deliver, self.engine_lost)
        self._contents = SentContents()
        self._watching: asyncio.Task[None] | None = None
        self._throughput = ThroughputEstimate()
        self._clock = clock or WallClock()
        self._origin = origin
        self._limits = limits = limits or ClientLimits()
        self._heartbeat_timeout_s = min(limits.heartbeat_timeout_s, limits.watchdog_s)
        self._is_kept_up = is_kept_up
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._codec = message_codec()
        self._sendable_text = ""
        """The constraint of the latest request, known to fit into a frame."""
        self._ready: Ready | None = None
        self.desired_state = DesiredState()
        """State set by control verbs, which a replacement engine must have too."""
        self._lost = ""
        """Why the engine is gone; "" while it lives."""
        self.exit_code = DeviceError.exit_code
        """Exit code of the server if the engine stays lost."""
        self.is_stuck = False
        """The lost engine process may still exist but makes no progress."""
        self._is_reviving = False
        self._hello: Ready | None = None
        """The engine's Ready message. It becomes `_ready` once the engine may get requests."""
        self._decided = asyncio.Event()
        """Set when Ready has arrived or the engine is lost."""
        self._is_lost = asyncio.Event()

    async def start(self) -> None:
        """Open the link. The engine may start before or after."""
        self._connection.open()
        every_s = min(_MAX_CHECK_INTERVAL_S, self._heartbeat_timeout_s / _CHECKS_PER_TIMEOUT)
        watch = _watch(self._check_progress, every_s)
        self._watching = asyncio.create_task(watch, name="engine-client-watch")

    async def close(self) -> None:
        """End every stream and call, stop listening, release the link."""
        self.give_up("The server is shutting down.")
        if self._watching is not None:
            self._watching.cancel()
        self._connection.close()

    async def ready(self) -> Ready:
        """Wait until the engine can admit requests; BanyanError if it dies instead."""
        await self._decided.wait()
        if self._lost or self._hello is None:
            raise BanyanError.with_exit_code(self._lost, self.exit_code)
        return self._hello

    async def lost(self) -> str:
        """Wait until the engine is gone (death or Fatal message); return why."""
        await self._is_lost.wait()
        return self._lost

    def submit(self, generate: Generate) -> EventStream:
        """Start a request; RequestError if the engine cannot take it or its id is in use."""
        self._refuse_unless_ready()
        if generate.request in self.streams:
            raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
        most = self._limits.max_open
        if most and not self.streams.fits(generate.caller, most):
            raise RequestError(
                f"{len(self.streams)} sequences are open; at most {most} are taken, and a part of "
                "them is kept for other callers",
                status=429,
                code="too_many_requests",
                hint="Try again later",
            )
        self.refuse_if_full(generate.caller)
        self._refuse_unless_sendable(generate)
        stream = EventStream(self, generate, self._limits.max_waiting_events, self._is_kept_up)
        self.streams.add(stream, is_queued=not generate.grammar)
        self._connection.post(self._contents.lightened(generate))
        return stream

    def refuse_if_full(self, caller: bytes = b"") -> None:
        """RequestError 503 if the engine's queue is certainly full, or the caller's share of it:
        more requests are open than can run and wait. Refusing here saves parsing the request and a
        message to the engine."""
        if not self._limits.max_queued or self._ready is None:
            return
        if not self.streams.queue_fits(caller, self._ready.max_running + self._limits.max_queued):
            raise RequestError("The request queue is full.", status=503, code="queue_full")

    def take_over(self, stream: EventStream) -> None:
        """Run a request of another engine that has produced no output; at most once per request."""
        generate, stream.unanswered = stream.unanswered, None
        assert generate is not None
        stream.owner = self
        self.streams.add(stream, is_queued=not generate.grammar)
        self._connection.post(self._contents.lightened(generate))

    def abort(self, request: RequestId) -> None:
        """End a request at any state; its stream ends with Finished("abort"). Unknown: no-op."""
        if self._ready is None:  # no engine has the request
            if stream := self.streams.remove(request):
                stream.put(Finished(request, "abort", stream.num_prompt, 0, 0))
        elif request in self.streams:
            self.streams.mark_ending(request)
            self._contents.whole(request)
            self._connection.post(Abort(request))

    def stop_at(self, request: RequestId, length: int) -> None:
        """Keep `length` output tokens and finish; its stream ends with Finished("stop")."""
        if request in self.streams:
            self.streams.mark_ending(request)
            self._connection.post(StopAt(request, length))

    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply:
        """Run an administrative verb; RequestError 504 if no reply arrives in time."""
        self._refuse_unless_ready()
        reply = await self._call(verb, timeout_s, args)
        if reply.ok:
            self.desired_state.record(verb, args)
        return reply

    async def _call(
        self, verb: str, timeout_s: float, args: Mapping[str, str | int | float | bool]
    ) -> Reply:
        call = next(self._call_numbers)
        message = Control(call, verb, self._origin, dict(args))
        self._refuse_unless_sendable(message)
        answer = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        self._connection.post(message)
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
        """Handle the loss of the engine (from the supervisor, or its Fatal message): end every
        stream and call, except requests that the next engine can run."""
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
        """No replacement will come: fail everything that is open."""
        self._is_kept_up, self.remedy = False, ""
        self.engine_lost(reason)
        self._lost = reason
        self.streams.end(self.streams.all(), reason, "engine_unavailable")

    async def listen(self, link: FrontLink) -> None:
        """Connect to the replacement engine; it gets no requests before `revive`."""
        self._connection.close()
        self._connection = EngineConnection(link, self._deliver, self.engine_lost)
        self._contents = SentContents()
        self.stats, self.stats_at_s = Stats(), 0.0
        self._lost, self.is_stuck, self._is_reviving = "", False, True
        self._decided.clear()
        self._is_lost.clear()
        self._connection.open()

    async def revive(self, timeout_s: float) -> None:
        """Wait for the replacement engine, bring it to the desired state, and send it the waiting
        requests.

        Args:
            timeout_s: for each control verb.

        Raises:
            BanyanError: the engine is lost as well, or refuses a verb.
        """
        try:
            await self.ready()
            reached = DesiredState()
            while (call := self.desired_state.lacking(reached)) is not None:
                verb, args = call
                reply = await self._call(verb, timeout_s, args)
                if not reply.ok and verb != ATTACH:
                    raise DeviceError(f"the new engine could not {verb}: {reply.text}")
                if not reply.ok:
                    log.warning("the new engine continues without a cache store: %s", reply.text)
                reached.record(verb, args)
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
        if self.stats.step_age_s > self._limits.watchdog_s:
            age_s = self.stats.step_age_s
            return Health(True, True, False, f"A step has been running for {age_s:.1f} s.")
        return Health(True, True, True)

    def replicas(self) -> list[Replica]:
        """This engine alone."""
        is_alive = self._ready is not None
        return [Replica(0, is_alive, self._ready, self.stats, self._throughput.per_s)]

    def _refuse_unless_ready(self) -> None:
        if self._lost:
            raise _gone(self.remedy or self._lost)
        if self._ready is None:
            raise RequestError(self.health().reason, status=503, code="engine_starting")

    def _refuse_unless_sendable(self, message: Message) -> None:
        """Refuse a message that no frame can hold: in the outbox it would end the link for
        everybody."""
        checked = message
        if isinstance(message, Generate) and message.grammar == self._sendable_text:
            checked = msgspec.structs.replace(
                message, grammar=""
            )  # checked once for the sequences of a request
        try:
            self._codec.check(checked)
        except WireError as error:
            raise RequestError(f"The request cannot be sent to the engine: {error}") from None
        if isinstance(message, Generate):
            self._sendable_text = message.grammar

    def _check_progress(self, was_stuck: bool) -> bool:
        """Check whether the engine is stuck; if so twice in a row, end what is open. Once is not
        enough: after a pause of this process, heartbeats may still wait to be read."""
        health = self.health()
        is_stuck = health.ready and not health.progressing
        if is_stuck and was_stuck and self._is_kept_up:
            self.is_stuck = True
            self.engine_lost(f"The engine was stuck. {health.reason}", code="engine_stuck")
        elif is_stuck and was_stuck:
            self._fail_open(health.reason)
        return is_stuck

    def _fail_open(self, reason: str) -> None:
        """Fail every open request. Ids stay in use until the engine reports their end."""
        ended = [stream for stream in self.streams.all() if not stream.is_complete]
        for stream in ended:
            stream.put(Failed(stream.request, 503, reason, "engine_stuck"))
            self.abort(stream.request)
        if ended:
            log.error("the engine is stuck: ended %d requests: %s", len(ended), reason)

    def _deliver(self, event: Event) -> None:
        if self._lost:  # its requests may already run elsewhere
            return
        if isinstance(event, Tokens | Finished | Failed):
            whole = self._contents.whole(event.request)
            if whole is not None and isinstance(event, Failed) and event.code == CONTENT_UNKNOWN:
                self._connection.post(whole)
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
                self._throughput.add(event.finished, event.waiting, self.stats_at_s)
            case Ready():
                self._hello = event
                if not self._is_reviving:
                    self._ready = event
                self.stats_at_s = self._clock.now()
                self._decided.set()
            case Fatal():
                self.engine_lost(event.text, event.exit_code)


class SentContents:
    """Sends the data of a content to an engine once: later requests, and the other sequences of
    the same one, only name it. An engine that has dropped it gets the whole request again."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self._whole: dict[RequestId, Generate] = {}
        """Requests that were sent without data, until their first event."""

    def lightened(self, generate: Generate) -> Generate:
        """The request without data that was sent before."""
        known = [content.digest in self._digests for content in generate.contents]
        for content in generate.contents:
            if content.data:
                self._digests[content.digest] = None
                self._digests.move_to_end(content.digest)
        while len(self._digests) > _MOST_DIGESTS:
            self._digests.popitem(last=False)
        if not any(known):
            return generate
        self._whole[generate.request] = generate
        contents = tuple(
            msgspec.structs.replace(content, data=b"") if is_known else content
            for content, is_known in zip(generate.contents, known, strict=True)
        )
        return msgspec.structs.replace(generate, contents=contents)

    def whole(self, request: RequestId) -> Generate | None:
        """The request with its data if it was sent without, at most once."""
        return self._whole.pop(request, None)


class EngineConnection:
    """The link to one engine: an outbox of messages, and a callback for events.

    Args:
        link: this side of the link; `close` closes it.
        deliver: called with every event, in order.
        failed: called with the error text when the link fails.
    """

    def __init__(
        self, link: FrontLink, deliver: Callable[[Event], None], failed: Callable[[str], None]
    ) -> None:
        self.link = link
        self._deliver = deliver
        self._failed = failed
        self._outbox: list[Message] = []
        self._is_open = False

    def open(self) -> None:
        """Start to send and receive."""
        self._is_open = True
        self.link.listen(self._take)
        self._send()

    def post(self, message: Message) -> None:
        """Queue a message. Messages of one event-loop iteration go in one frame."""
        if self._is_open and not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(message)

    def close(self) -> None:
        self._is_open = False
        self.link.close()

    def _send(self) -> None:
        if not self._is_open:
            return
        messages, self._outbox = self._outbox, []
        try:
            self.link.send(messages)
        except Exception as error:
            self._fail(error)

    def _take(self) -> None:
        """Deliver events at once, in the event loop's readability callback: every token passes
        here."""
        try:
            for event in self.link.receive():
                self._deliver(event)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self.link.listen(None)
        log.exception("the link to the engine failed")
        self._failed(f"The link to the engine failed: {type(error).__name__}: {error}")


async def _watch(look: Callable[[bool], bool], every_s: float) -> None:
    """Call `look` periodically with its previous result."""
    found = False
    while True:
        await asyncio.sleep(every_s)
        try:
            found = look(found)
        except Exception:  # otherwise the checks would end silently
            log.exception("a health check of the engine failed")


def _gone(reason: str) -> RequestError:
    return RequestError(reason, status=503, code="engine_unavailable")
