"""EngineLoop: drives an EngineCore in one thread.

It receives messages, launches plans, collects results and sends events. It sleeps only in `poll`,
on the client's link, the wake event and, with DP attention, the step clock.
"""

import math
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from banyan.base.clock import Clock
from banyan.base.errors import DeviceError
from banyan.base.ids import StepId
from banyan.base.log import logger
from banyan.base.thread_pool import WakeEvent
from banyan.base.trace import Marks
from banyan.dp_attention.step_clock import StepClock
from banyan.engine.control import answer
from banyan.engine.core import CoreInput, EngineCore
from banyan.engine.grammar_queue import GrammarQueue
from banyan.engine.launcher import Handle, Launcher
from banyan.engine.outbox import ENDS, EventOutbox
from banyan.engine.step_log import StepLog
from banyan.engine.watchdog import RankMonitor, Watchdog
from banyan.kv_cache.cache_events import Removed, Stored
from banyan.messages.control_ops import ControlOp
from banyan.messages.disaggregation import KVTransferEvent, KVTransferOp
from banyan.messages.events import Event, Failed, Fatal, Ready, Stats, Tokens
from banyan.messages.plan import (
    NOT_FINITE,
    CopyResult,
    Held,
    Lookup,
    Mask,
    StepPlan,
    StepResult,
)
from banyan.messages.requests import (
    NO_CALL,
    Abort,
    Control,
    Generate,
    Message,
    RunControlOps,
    StopAt,
)
from banyan.messages.spans import CONTENT_UNKNOWN
from banyan.scheduler.output_processor import partial_tokens

log = logger(__name__)

HEARTBEAT_S = 0.25
REST_S = 30.0
"""Idle time after which trimming memory (`on_rest`) pays off."""
BLAME_S = 2.0
"""How long a failed step waits for the report that another rank has died of it."""
SMOOTHING = 0.3
"""Weight of the newest measurement in `StepForecast`."""
LEAD_S = 0.002
"""Time kept for planning and launching, on top of twice what they have taken."""


class Link(Protocol):
    """The engine's end of the link to its client."""

    def poll_fd(self) -> int: ...
    def receive(self) -> list[Message]: ...
    def send(self, events: list[Event]) -> None: ...


class CacheEventSink(Protocol):
    """Publishes what the cache stores and removes (engine/kv_events.py)."""

    def publish(self, events: Sequence[Stored | Removed]) -> None: ...


class StoreMover(Protocol):
    """Copies pages to and from a store or another server, in the background. It wakes the loop."""

    def look(self, lookups: list[Lookup]) -> None: ...
    def execute(self, ops: list[KVTransferOp]) -> None: ...
    def ended(self) -> list[CopyResult | Held | KVTransferEvent]: ...
    def close(self) -> None: ...


class Balancer(Protocol):
    """Decides which experts move between steps (moe/balancer.py). It wakes the loop."""

    def due(self) -> list[ControlOp]: ...


@dataclass(frozen=True)
class LoopConfig:
    """Numbers and switches of an EngineLoop.

    Attributes:
        check_ledger: check every invariant after every step (tests).
        crashes_on_nan: a row whose logits are not finite ends the engine, not only its request.
        receive_interval: steps after which messages are read, while steps run.
        watchdog_s: time without progress after which the log gets a report of all threads.
        soft_watchdog_s: a second, shorter limit for such a report; 0 = none.
        silence_s: time without a sign of life from another rank after which the log gets one.
    """

    check_ledger: bool = False
    crashes_on_nan: bool = False
    receive_interval: int = 1
    watchdog_s: float = 300.0
    soft_watchdog_s: float = 0.0
    silence_s: float = 20.0


@dataclass(frozen=True)
class LoopParts:
    """Optional parts of an EngineLoop; None = the replica does without.

    Attributes:
        grammar_queue: holds requests until their grammar is compiled.
        ranks: the other ranks. A failed step then ends the engine: the others may hang in it.
        marks: profiler spans of the loop's thread.
        mover: moves KV pages.
        step_clock: agreement with the other replicas of DP attention; all of them end together.
        publisher: gets cache events.
        balancer: moves experts.
        interrupt: ends multi-step plans, up to this one, after the decode step that runs.
        so_far: tokens that the running multi-step plan has sampled so far, by row.
        go_on: pipeline parallel: called with the number of plans in flight when no plan follows.
        step_log: writes lines about the load.
        on_rest: called when the first work (usually the warm-up) is done, and then after every
            REST_S without work.
    """

    grammar_queue: GrammarQueue | None = None
    ranks: RankMonitor | None = None
    marks: Marks | None = None
    mover: StoreMover | None = None
    step_clock: StepClock | None = None
    publisher: CacheEventSink | None = None
    balancer: Balancer | None = None
    interrupt: Callable[[StepId], None] | None = None
    so_far: Callable[[StepId], Mapping[int, bytes] | None] | None = None
    go_on: Callable[[int], None] | None = None
    step_log: StepLog | None = None
    on_rest: Callable[[], None] | None = None


class StepForecast:
    """Predicts how long the step in flight will take, so that the next one is planned late.

    A plan made early cannot include a request that arrives a moment later; a plan made too late
    leaves the runner idle. Keeps running means of step seconds by size class (powers of two of
    tokens), of planning, and of launching if that overlaps with the step in flight.
    """

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}
        self._plan_s = self._launch_s = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        before = self._step_s.get(size, seconds)
        self._step_s[size] = before + SMOOTHING * (seconds - before)

    def planned(self, seconds: float) -> None:
        self._plan_s += SMOOTHING * (seconds - self._plan_s)

    def launched(self, seconds: float) -> None:
        self._launch_s += SMOOTHING * (seconds - self._launch_s)

    def wait(self, tokens: int, running_s: float, steps: int = 1) -> float:
        """Seconds until the next step should be planned.

        Args:
            tokens: size of the step that runs now.
            running_s: how long it has been running.
            steps: decode steps in its plan. The end of several is less certain, and an arrival
                ends the next plan after its first step, so one step is kept as reserve.
        """
        step_s = self._step_s.get(tokens.bit_length(), 0.0)
        expected = max(1, steps - 1) * step_s
        lead = LEAD_S + 2 * (self._plan_s + self._launch_s)
        return max(0.0, expected - running_s - lead)


_DEFAULT_CONFIG = LoopConfig()
_NO_PARTS = LoopParts()


class EngineLoop:
    """Drives one EngineCore until `stop`.

    Args:
        core: makes the decisions.
        launcher: runs plans; it wakes the loop when one is done.
        link: to the client.
        wake: wakes the loop.
    """

    def __init__(
        self,
        core: EngineCore,
        launcher: Launcher,
        link: Link,
        wake: WakeEvent,
        clock: Clock,
        config: LoopConfig = _DEFAULT_CONFIG,
        parts: LoopParts = _NO_PARTS,
    ) -> None:
        self._core = core
        self._launcher = launcher
        self._link = link
        self._wake = wake
        self._clock = clock
        self._config = config
        self._grammar_queue = parts.grammar_queue
        self._ranks = parts.ranks
        self._marks = parts.marks or Marks("engine")
        self._mover = parts.mover
        self._step_clock = parts.step_clock
        self._publisher = parts.publisher
        self._balancer = parts.balancer
        self._interrupt = parts.interrupt
        self._so_far = parts.so_far
        self._go_on = parts.go_on
        self._on_rest = parts.on_rest
        self._contents = ContentStore()
        self._ends: list[Abort | StopAt] = []
        """Ends of requests whose latest sent tokens are not committed yet; they wait for that."""
        silence_s = min(config.silence_s, config.watchdog_s)
        self._watchdogs = [self._watchdog(config.watchdog_s, silence_s)]
        if config.soft_watchdog_s:
            self._watchdogs.append(self._watchdog(config.soft_watchdog_s, math.inf))
        self._stats = Stats()
        self._step_log = parts.step_log or StepLog(0)
        self._flying: deque[Handle] = deque()
        """Plans in flight, oldest first."""
        self._forecast = StepForecast()
        self._outbox = EventOutbox()
        self._started_s = 0.0
        """When the oldest step in flight began to run."""
        self._turned_s = clock.now()
        """When the latest iteration began."""
        self._beat_s = 0.0
        """When the latest heartbeat was sent."""
        self._was_idle = True
        self._unread_steps = 0
        """Steps since messages were read."""
        self._rests_s: float | None = None
        """Since when the engine is idle; None while it works, and once `on_rest` was called."""
        self._pause_s = 0.0
        """Idle time until `on_rest` is called."""
        self._is_stopping = False
        self._failure = ""
        self._failed = threading.Event()

    def _watchdog(self, limit_s: float, silence_s: float) -> Watchdog:
        return Watchdog(limit_s, self._stuck_s, self._plans, self._queues, self._ranks, silence_s)

    def run(self, ready: Ready) -> None:
        """Serve until `stop`. If the loop itself fails, every open request ends with Fatal."""
        self._link.send([ready])
        self._step_log.capacity = ready.max_total_tokens
        self._turned_s = self._clock.now()
        for watchdog in self._watchdogs:
            watchdog.start()
        poller = select.poll()
        poller.register(self._link.poll_fd(), select.POLLIN)
        poller.register(self._wake.fd, select.POLLIN)
        readable = {self._link.poll_fd(), self._wake.fd}
        if self._step_clock is not None:
            poller.register(self._step_clock.poll_fd, select.POLLIN)
        reason = ""
        try:
            while not self._is_stopping:
                self._turn(readable)
                # A link that is not read must not end the wait at once.
                poller.modify(self._link.poll_fd(), 0 if self._reads_later() else select.POLLIN)
                readable = {fd for fd, _ in poller.poll(self._wait_ms())}
        except Exception as error:
            log.exception("the engine loop failed")
            reason = f"{type(error).__name__}: {error}"
            self._link.send([Fatal(f"The engine failed: {type(error).__name__}: {error}")])
            raise
        finally:
            if self._step_clock is not None:
                self._step_clock.close(reason)
            if self._failure:  # clients have the reason; the log gets the state of all threads
                self._watchdogs[0].report(self._failure)
            for watchdog in self._watchdogs:
                watchdog.close()
            self._launcher.close()
            if self._mover is not None:
                self._mover.close()

    def stop(self) -> None:
        """End the loop soon; safe from any thread and from signal handlers."""
        self._is_stopping = True
        self._wake.wake()

    def fail(self, text: str) -> None:
        """End the engine because a part of it has died; safe from any thread."""
        self._failure = text
        self._failed.set()
        self._wake.wake()

    def _turn(self, readable: set[int]) -> None:
        """One iteration. readable: the descriptors that polled readable."""
        if self._wake.fd in readable:
            self._wake.clear()
        if self._failure:
            raise DeviceError(self._failure)
        if self._step_clock is not None:
            self._step_clock.receive()
            self._step_clock.check()
        now = self._turned_s = self._clock.now()
        self._marks.begin()
        events: list[Event] = []
        if self._link.poll_fd() in readable:
            self._unread_steps = 0
            for message in self._link.receive():
                self._receive(message, events, now)
        if self._grammar_queue is not None and self._grammar_queue.waiting:
            self._grammar_queue.release(lambda generate: self._admit(generate, now))
        self._marks.end("receive")
        self._collect(events)
        if self._mover is not None:
            for ended in self._mover.ended():
                self._core.receive(ended, now)
            self._mover.look(self._core.scheduler.store_fetcher.take_lookups())
            self._mover.execute(self._core.scheduler.take_transfer_ops())
        if self._balancer is not None and (orders := self._balancer.due()):
            self._core.receive(RunControlOps(NO_CALL, orders), now)
        if self._publisher is not None and self._core.scheduler.cache.events is not None:
            self._publisher.publish(self._core.scheduler.cache.events.take())
        self._marks.end("commit")
        self._launch()
        if self._mover is not None:
            self._mover.execute(self._core.scheduler.take_transfer_ops())
        self._marks.end("plan")
        events += self._core.take_events()
        if self._core.scheduler.contents.dropped:
            self._contents.drop(self._core.scheduler.contents.take_dropped())
        self._deliver(self._core.take_masks())
        self._beat(events)
        events = self._outbox.filter(events, now) + self._outbox.early(self._early_tokens())
        if events:
            self._link.send(events)
        self._marks.end("send", events=len(events))
        if self._rests_s is not None and now - self._rests_s >= self._pause_s:
            self._rests_s, self._pause_s = None, REST_S
            if self._on_rest is not None:
                self._on_rest()

    def _reads_later(self) -> bool:
        """Whether messages wait for further steps (--scheduler-recv-interval)."""
        return bool(self._flying) and self._unread_steps < self._config.receive_interval - 1

    def _receive(self, message: Message, events: list[Event], now: float) -> None:
        grammars = self._grammar_queue
        is_for_it = grammars is not None and (grammars.waiting or _has_grammar(message))
        if grammars is not None and is_for_it and grammars.holds(message, events):
            return
        if isinstance(message, Control):
            reply = answer(self._core, message, now)
            if reply is not None:
                events.append(reply)
            return
        is_end = isinstance(message, Abort | StopAt)
        if is_end and self._flying and self._outbox.is_early(message.request):
            self._ends.append(message)
            self._end_multi_step()
            return
        self._admit(message, now)

    def _admit(self, message: CoreInput, now: float) -> None:
        if isinstance(message, Generate):
            refused: list[Event] = []
            found = self._contents.take(message, refused)
            if found is None:
                self._link.send(refused)
                return
            self._outbox.expect(found)
            message = found
        self._core.receive(message, now)
        self._end_multi_step()

    def _end_multi_step(self) -> None:
        """Let the next plan include what has just arrived."""
        if self._interrupt is not None and any(plan.steps > 1 for plan in self._plans()):
            self._interrupt(self._plans()[-1].step)

    def _early_tokens(self) -> list[Tokens]:
        """Tokens that the oldest plan in flight has sampled so far."""
        if self._so_far is None or not self._flying or not self._flying[0].plan.report_every:
            return []
        step = self._flying[0].plan.step
        tokens = self._so_far(step)
        flights = self._core.scheduler.flights.get(step, [])
        return [] if tokens is None else partial_tokens(flights, tokens)

    def _collect(self, events: list[Event]) -> None:
        """Commit every step that is done, oldest first."""
        while self._flying and self._flying[0].is_done():
            handle = self._flying.popleft()
            result, now = handle.result, self._clock.now()
            assert result is not None
            is_shared = self._ranks is not None or self._step_clock is not None
            if result.error and is_shared:
                raise self._out_of_step(result)
            self._unread_steps += 1
            if not handle.plan.control_ops:
                # Launches overlap with the device: the slower of the two decides.
                took = max(handle.launch_s, handle.wait_s) or result.seconds
                self._forecast.measured(handle.tokens, took / _ran(handle.plan, result))
                self._forecast.launched(handle.launch_s)
            new_events, masks = self._core.complete(result, now)
            if self._config.crashes_on_nan:
                _check_rows(result)
            events += new_events
            self._deliver(masks)
            ends, self._ends = self._ends, []
            for message in ends:
                self._admit(message, now)
            if handle.copies is not None:
                self._core.receive(handle.copies, now)
            self._started_s = now
            prompts = self._step_log.prompts_of(handle.plan)
            if prompts[0]:
                self._step_log.write_prompts(prompts, self._core.stats(now))
            if self._step_log.count(handle.plan):
                self._step_log.write(self._core.stats(now), now)
            if self._config.check_ledger:
                self._core.check()

    def _out_of_step(self, result: StepResult) -> DeviceError:
        """Why a step failed. If another rank has died, that is the better reason."""
        if self._step_clock is not None:
            self._step_clock.receive()  # raises if another replica has ended
        self._failed.wait(BLAME_S)
        text = self._failure or f"step {result.step} failed on rank 0: {result.error}"
        return DeviceError(text, hint="the ranks are no longer in step: start the replica again")

    def _stuck_s(self) -> float:
        """Seconds since the latest iteration, or since the running step began; from any thread.

        Control ops have no time limit.
        """
        now, plans = self._clock.now(), self._plans()
        is_running = any(not plan.control_ops for plan in plans)
        return max(now - self._turned_s, now - self._started_s if is_running else 0.0)

    def _queues(self) -> str:
        """Queue lengths as of the latest heartbeat; from any thread."""
        s, grammars = self._stats, self._grammar_queue
        waiting = 0 if grammars is None else len(grammars.waiting)
        return (
            f"running={s.running} waiting={s.waiting} waiting_for_grammars={waiting} "
            f"free_pages={s.free_pages} held_pages={s.held_pages} total_pages={s.total_pages}"
        )

    def _plans(self) -> list[StepPlan]:
        return [handle.plan for handle in self._flying.copy()]

    def _launch(self) -> None:
        while not self._flying or self._wait_to_plan() <= 0:
            now = self._clock.now()
            if self._core.in_flight >= self._core.depth:
                return
            plan = self._core.launch(now)
            if plan is None:
                if self._go_on is not None and self._flying:
                    self._go_on(len(self._flying))
                return
            if not self._flying:
                self._started_s = now
                self._step_log.begin_work(now)
            self._flying.append(self._launcher.launch(self._contents.fill(plan)))
            self._forecast.planned(self._clock.now() - now)

    def _wait_to_plan(self) -> float:
        if self._go_on is not None:  # a pipeline stage without a plan would be idle
            return 0.0
        tokens = sum(handle.tokens for handle in self._flying)
        steps = max((handle.steps for handle in self._flying), default=1)
        return self._forecast.wait(tokens, self._clock.now() - self._started_s, steps)

    def _deliver(self, masks: list[Mask]) -> None:
        for mask in masks:
            for handle in self._flying:
                if handle.plan.step == mask.step:
                    handle.mask(mask)

    def _beat(self, events: list[Event]) -> None:
        now = self._clock.now()
        is_idle = self._core.is_idle
        if is_idle and not self._was_idle:
            self._audit()
            self._step_log.end_work(now)
            self._rests_s = now
            if self._core.recorder is not None:
                self._core.recorder.rested(now)
        elif not is_idle:
            self._rests_s = None
        is_due = now - self._beat_s >= HEARTBEAT_S or (is_idle and not self._was_idle)
        # A client that reads the counters after its answer must find itself in them.
        if is_due or any(isinstance(event, ENDS) for event in events):
            self._beat_s = now
            stats = self._core.stats(now)
            if self._ranks is not None:
                rank, silent_s = self._ranks.silence()
                stats = msgspec.structs.replace(stats, silent_rank=rank, silent_s=silent_s)
            self._stats = stats
            events.append(stats)
        self._was_idle = is_idle

    def _audit(self) -> None:
        """Check the page ledger while idle; Stats.leaked keeps reporting a broken one."""
        try:
            self._core.check()
        except AssertionError as error:
            log.error("ledger broken: %s", error)

    def _wait_ms(self) -> int:
        wait_s = max(0.0, self._beat_s + HEARTBEAT_S - self._clock.now())
        if self._flying and self._core.in_flight < self._core.depth:
            to_plan = self._wait_to_plan()
            if to_plan > 0:
                wait_s = min(wait_s, to_plan)
        return int(wait_s * 1000) + (wait_s > 0)


def _has_grammar(message: Message) -> bool:
    return isinstance(message, Generate) and bool(message.grammar)


def _check_rows(result: StepResult) -> None:
    """Raise DeviceError if the logits of a row were not finite."""
    for failure in result.failed:
        if failure.text == NOT_FINITE:
            where = f"row {failure.row} of step {result.step}"
            raise DeviceError(f"{where}: {NOT_FINITE}, and --crash-on-nan is given")


def _ran(plan: StepPlan, result: StepResult) -> int:
    """Decode steps of a plan that have run."""
    return 1 if plan.steps == 1 else max([1, *(len(tokens) // 4 for tokens in result.tokens)])


class ContentStore:
    """The data of contents (messages/spans.py), next to a core that works on digests and sizes
    only. So a journal holds no data, and data travels to the runner once."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._data)

    def take(self, generate: Generate, events: list[Event]) -> Generate | None:
        """The request without data, which is kept; None = it failed, as data is missing."""
        if not generate.contents:
            return generate
        for content in generate.contents:
            if not content.data and content.digest not in self._data:
                text = "The engine does not have a content of the prompt any more"
                events.append(Failed(generate.request, 409, text, CONTENT_UNKNOWN))
                return None
        for content in generate.contents:
            if content.data:
                self._data[content.digest] = content.data
        bare = tuple(msgspec.structs.replace(content, data=b"") for content in generate.contents)
        return msgspec.structs.replace(generate, contents=bare)

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with the data of its new contents."""
        if not plan.contents:
            return plan
        contents = [
            msgspec.structs.replace(content, data=self._data.get(content.digest, b""))
            for content in plan.contents
        ]
        return msgspec.structs.replace(plan, contents=contents)

    def drop(self, digests: list[bytes]) -> None:
        """The core has no use for these any more."""
        for digest in digests:
            self._data.pop(digest, None)
