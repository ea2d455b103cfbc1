"""DataParallelClient: several engines with the interface of one.

A request goes to one engine and stays there, unless the engine dies before it has produced output.
Control verbs go to all engines. If an engine dies, its remaining requests end and the others
continue; the client is lost with the last engine. With DP attention the engines need each other
at every step, so the worst of them is the state of all. `agreed` runs a verb on all replicas or on
none.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from banyan.base.errors import DeviceError, RequestError
from banyan.base.ids import RequestId
from banyan.base.log import logger
from banyan.engine_client.client import EngineClient, Engines, Health, Replica
from banyan.engine_client.event_stream import EventStream
from banyan.messages.disaggregation import replica_of
from banyan.messages.events import Ready, Reply, Stats
from banyan.messages.requests import Generate

log = logger(__name__)

Route = Callable[[Sequence[int], Sequence[int], int], int]
"""(open requests of each living engine, their tokens, requests sent so far) -> index of the engine
that takes the next; see scheduler/routing.py."""
PERIOD_S = 10.0
"""Between two samples of the load."""
NUM_SAMPLES = 361
"""Of an hour."""
COUNTERS = ("output_tokens", "prompt_tokens", "cached_tokens", "steps")
"""Counters of Stats in a sample; their sums over all replicas."""


class DataParallelClient:
    """Engines that serve the same model, as one `engine_client.client.Engines`.

    Args:
        engines: at least one.
        route: chooses the engine of a request.
        uses_dp_attention: the engines compute each step together and end together.
        is_prefill_side: the engines compute prompts for other servers (PD disaggregation).
        follows_room: a request goes to the engine that its bootstrap room selects, unless it names
            one itself; always so on the prefill side.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        route: Route,
        uses_dp_attention: bool = False,
        is_prefill_side: bool = False,
        follows_room: bool = False,
    ) -> None:
        self._is_prefill_side = is_prefill_side
        self._follows_room = is_prefill_side or follows_room
        self._engines = tuple(engines)
        self._uses_dp_attention = uses_dp_attention
        self._route = route
        self._sent = 0

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()

    async def ready(self) -> Ready:
        """Wait until every engine can admit requests; BanyanError if one dies instead."""
        found = await asyncio.gather(*(engine.ready() for engine in self._engines))
        return msgspec.structs.replace(
            found[0],
            max_total_tokens=sum(ready.max_total_tokens for ready in found),
            max_running=sum(ready.max_running for ready in found),
        )

    async def lost(self) -> str:
        """Wait until the last engine is gone; return why."""
        waits = {asyncio.create_task(engine.lost()): engine for engine in self._engines}
        reason = ""
        try:
            for wait in asyncio.as_completed(waits):
                reason = await wait
                left = len(self._alive())
                if left:
                    log.error("an engine died, %d go on: %s", left, reason)
        finally:
            for wait in waits:
                wait.cancel()
        return reason

    def submit(self, generate: Generate) -> EventStream:
        if any(generate.request in engine.streams for engine in self._engines):
            raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
        wanted = generate.replica
        if wanted >= len(self._engines):
            raise RequestError(
                f"There are {len(self._engines)} replicas, and none number {wanted}.",
                param="routed_dp_rank",
            )
        if wanted < 0 and self._follows_room and generate.transfer_id:
            wanted = replica_of(generate.transfer_id, len(self._engines))
        if wanted >= 0:
            return self._engines[wanted].submit(generate)
        alive = self._working() or self._alive() or self._engines
        chosen = 0
        if len(alive) > 1:
            requests, tokens = [len(e.streams) for e in alive], [e.streams.tokens for e in alive]
            chosen = self._route(requests, tokens, self._sent)
        stream = alive[chosen].submit(generate)
        self._sent += 1
        return stream

    def refuse_if_full(self, caller: bytes = b"") -> None:
        """RequestError 503 if the queue of every live engine is full for the caller."""
        refusal: RequestError | None = None
        for engine in self._working():
            try:
                engine.refuse_if_full(caller)
            except RequestError as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def abort(self, request: RequestId) -> None:
        for engine in self._engines:
            engine.abort(request)

    def stop_at(self, request: RequestId, length: int) -> None:
        for engine in self._engines:
            engine.stop_at(request, length)

    async def control(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> Reply:
        """Run a verb on every ready engine; return the first refusal, else the first reply. An
        accepted verb becomes desired state for engines that come back later."""
        able = [engine for engine in self._engines if engine.health().ready] or self._engines
        calls = (engine.control(verb, timeout_s, **args) for engine in able)
        results = await asyncio.gather(*calls, return_exceptions=True)
        replies = [result for result in results if isinstance(result, Reply)]
        for engine, result in zip(able, results, strict=True):
            if isinstance(result, BaseException) and (engine.health().ready or not replies):
                raise result  # an engine lost meanwhile gets the verb when it is back
        refusal = next((reply for reply in replies if not reply.ok), None)
        if refusal is None:
            for engine in self._engines:
                engine.desired_state.record(verb, args)
        return refusal or replies[0]

    async def ask(
        self, verb: str, timeout_s: float = 60.0, **args: str | int | float | bool
    ) -> list[tuple[int, Reply]]:
        """Replies of the ready engines to a read-only verb, with their numbers. An engine that
        is lost meanwhile is left out."""
        able = [(i, engine) for i, engine in enumerate(self._engines) if engine.health().ready]
        calls = (engine.control(verb, timeout_s, **args) for _, engine in able)
        results = await asyncio.gather(*calls, return_exceptions=True)
        found: list[tuple[int, Reply]] = []
        for (number, engine), result in zip(able, results, strict=True):
            if not isinstance(result, BaseException):
                found.append((number, result))
            elif engine.health().ready:
                raise result
        return found

    def share_out(self, lost: EngineClient) -> None:
        """Move the requests that wait for a lost engine to live engines, if there are any."""
        able = () if self._is_prefill_side else self._working()
        for stream in lost.streams.release() if able else ():
            requests, tokens = [len(e.streams) for e in able], [e.streams.tokens for e in able]
            able[self._route(requests, tokens, self._sent)].take_over(stream)
            self._sent += 1

    def engine_lost(self, reason: str, exit_code: int = DeviceError.exit_code) -> None:
        for engine in self._engines:
            engine.engine_lost(reason, exit_code)

    def health(self) -> Health:
        """The best engine's health: one live engine keeps the service up. With DP attention: the
        worst."""
        choose = min if self._uses_dp_attention else max
        found = [engine.health() for engine in self._engines]
        return choose(found, key=lambda h: (h.progressing, h.ready, h.alive))

    def replicas(self) -> list[Replica]:
        """Every engine in order, dead ones included."""
        parts = [part for engine in self._engines for part in engine.replicas()]
        return [replace(part, rank=number) for number, part in enumerate(parts)]

    @property
    def stats(self) -> Stats:
        """Sums over the engines; ages are the maximum."""
        parts = [msgspec.structs.asdict(engine.stats) for engine in self._engines]
        sums = {name: sum(part[name] for part in parts) for name in parts[0]}
        silent = max(parts, key=lambda part: part["silent_s"])
        oldest = {"step_age_s": max(part["step_age_s"] for part in parts)}
        return Stats(**sums | oldest | {k: silent[k] for k in ("silent_rank", "silent_s")})

    def _working(self) -> list[EngineClient]:
        return [engine for engine in self._engines if engine.health().progressing]

    def _alive(self) -> list[EngineClient]:
        return [engine for engine in self._engines if engine.health().alive]


async def agreed(
    engines: Engines,
    verb: str,
    timeout_s: float,
    is_paused: bool,
    **args: str | int | float | bool,
) -> Reply:
    """Run a verb that has a trial form ("try_" + verb, engine/control.py) on all replicas or none:
    each tries first while all are paused. The ranks of one replica agree by themselves
    (runner/control_ops.py).

    Args:
        is_paused: the caller has paused the engines and will resume them.

    Returns: the first refusal, or the first replica's reply.
    """
    if sum(replica.alive for replica in engines.replicas()) < 2:
        return await engines.control(verb, timeout_s, **args)
    if not is_paused:
        await engines.control("pause")
    try:
        tried = await engines.control(f"try_{verb}", timeout_s, is_idle=not is_paused, **args)
        return await engines.control(verb, timeout_s, **args) if tried.ok else tried
    finally:
        if not is_paused:
            await engines.control("resume")


class LoadHistory:
    """Samples of the load of the last hour, one each PERIOD_S, for the console.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    def start(self, replicas: Callable[[], Sequence[Replica]]) -> None:
        """Take samples on the running event loop, from now on."""
        self.sample(replicas(), time.time())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PERIOD_S, self.start, replicas)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sample(self, replicas: Sequence[Replica], now_s: float) -> None:
        ready = [(one.stats, one.ready) for one in replicas if one.alive and one.ready is not None]
        page = self._page_size
        sample: dict[str, float] = {
            "at": round(now_s, 3),
            "running": sum(stats.running for stats, _ in ready),
            "waiting": sum(stats.waiting for stats, _ in ready),
            "used": sum((s.held_pages + s.in_flight_pages) * page for s, _ in ready),
            "kept": sum(
                (s.held_pages + s.in_flight_pages + s.cached_pages) * page for s, _ in ready
            ),
            "most": sum(facts.max_total_tokens for _, facts in ready),
        }
        for name in COUNTERS:
            sample[name] = sum(getattr(stats, name) for stats, _ in ready)
        self._samples.append(sample)

    def samples(self) -> list[dict[str, float]]:
        """From the oldest to the newest: counters as they were, not their growth."""
        return list(self._samples)
