"""EngineLoop: the live shell around EngineCore. Inbox, core, launcher, outbox; a plain loop in one
thread. It blocks on two file descriptors only: the link to the front, and the runner's wake-up.
"""

import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from banyan.base.clock import Clock
from banyan.base.errors import DeviceError
from banyan.base.ids import StepId
from banyan.base.log import logger
from banyan.base.trace import Marks
from banyan.base.wake import WakeEvent
from banyan.dp_attention.step_clock import StepClock
from banyan.engine.control import answer
from banyan.engine.core import CoreInput, EngineCore
from banyan.engine.grammar_queue import GrammarQueue
from banyan.engine.launcher import Handle, Launcher
from banyan.engine.outbox import ENDS, Outbox
from banyan.engine.step_forecast import StepForecast
from banyan.engine.step_log import StepLog
from banyan.engine.watchdog import OtherRanks, Watchdog
from banyan.kv_cache.cache_events import Removed, Stored
from banyan.messages.control_ops import ControlOp
from banyan.messages.disaggregation import KVTransferEvent, KVTransferOp
from banyan.messages.events import Event, Fatal, Ready, Stats, Tokens
from banyan.messages.plan import NOT_FINITE, CopyResult, Held, Lookup, Mask, StepPlan, StepResult
from banyan.messages.requests import (
    NO_CALL,
    Abort,
    Control,
    Generate,
    Message,
    RunControlOps,
    StopAt,
)
from banyan.scheduler.multi_step import so_far

log = logger(__name__)

HEARTBEAT_S = 0.25
REST_S = 30.0
"""A pause after which `at_rest` costs the next request less than it is worth."""
BLAME_S = 2.0
"""How long the failure of a step waits for the word that another rank has died of it."""


class Link(Protocol):
    """The engine's end of the link to its front."""

    def poll_fd(self) -> int: ...
    def receive(self) -> list[Message]: ...
    def send(self, events: list[Event]) -> None: ...


class Publisher(Protocol):
    """Who is told what the cache holds."""

    def publish(self, news: Sequence[Stored | Removed]) -> None: ...


class StoreMover(Protocol):
    """Carries pages to and from a store or another server (kv_transfer/page_mover.py,
    kv_transfer/rooms); it rings the loop's wake."""

    def look(self, lookups: list[Lookup]) -> None: ...
    def execute(self, ops: list[KVTransferOp]) -> None: ...
    def ended(self) -> list[CopyResult | Held | KVTransferEvent]: ...
    def close(self) -> None: ...


class Balancer(Protocol):
    """Says what moves between steps; it rings the loop's wake (moe/balancer.py)."""

    def due(self) -> list[ControlOp]: ...


class EngineLoop:
    """Drives one EngineCore until told to stop.

    Args:
        core: decides.
        launcher: executes; it rings `wake` when a step is done.
        link: to the front.
        wake: the loop's wake-up.
        check_ledger: check every invariant after every step (tests).
        desk: where requests wait for their constraint; None without a grammar backend.
        ranks: None when there is one rank only. A step that fails is the end of several: the
            others may wait in the middle of it for ever.
        watchdog_s: without progress for this long, the log is told where everything stands.
        soft_watchdog_s: the same, for a shorter time; 0 = no such one.
        silence_s: the same, when another rank has given no sign of life for this long.
        step_log: told of every step.
        marks: of the loop's thread, for whoever records it.
        mover: of the runner, where pages go to a store; None without one.
        publisher: told what the cache holds; None = nobody is.
        hurry: ends the bursts of plans up to a step with the step that runs.
        so_far: what the rows of the burst that runs have sampled (ModelRunner.told); None = what a
            burst samples is known at its end.
        step_clock: by which the core agrees with the replicas that it shares batches with; they
            end together.
        crashes_on_nan: a row whose logits are not finite ends the engine, not its request alone.
        balancer: gives orders of its own; None where nobody does.
        go_on: told, where plans follow each other through several stages, that there is none to
            follow those in flight, and how many these are (pipeline/launcher.py).
        at_rest: called once the first work is done, the warm-up as a rule, and in every pause of
            REST_S.
    """

    def __init__(
        self,
        core: EngineCore,
        launcher: Launcher,
        link: Link,
        wake: WakeEvent,
        clock: Clock,
        check_ledger: bool = False,
        desk: GrammarQueue | None = None,
        ranks: OtherRanks | None = None,
        watchdog_s: float = 300.0,
        step_log: StepLog | None = None,
        marks: Marks | None = None,
        mover: StoreMover | None = None,
        soft_watchdog_s: float = 0.0,
        silence_s: float = 20.0,
        step_clock: StepClock | None = None,
        publisher: Publisher | None = None,
        interrupt: Callable[[StepId], None] | None = None,
        so_far: Callable[[StepId], Mapping[int, bytes] | None] | None = None,
        crashes_on_nan: bool = False,
        balancer: Balancer | None = None,
        go_on: Callable[[int], None] | None = None,
        at_rest: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._interrupt = interrupt
        self._so_far = so_far
        self._ends: list[Abort | StopAt] = []
        """Of requests of which more has been sent than is decided: they wait for that."""
        self._mover = mover
        self._publisher = publisher
        self._launcher = launcher
        self._link = link
        self._wake = wake
        self._clock = clock
        self._check_ledger = check_ledger
        self._crashes_on_nan = crashes_on_nan
        self._balancer = balancer
        self._go_on = go_on
        self._at_rest = at_rest
        self._desk = desk
        self._ranks = ranks
        stands = self._stuck_s, self._plans, self._queues
        silence_s = min(silence_s, watchdog_s)
        self._watchdogs = [Watchdog(watchdog_s, *stands, ranks, silence_s)]
        if soft_watchdog_s:
            self._watchdogs.append(Watchdog(soft_watchdog_s, *stands, ranks))
        self._stats = Stats()
        self._step_log = step_log or StepLog(0)
        self._marks = marks or Marks("engine")
        self._step_clock = step_clock
        self._flying: deque[Handle] = deque()
        self._forecast = StepForecast()
        self._outbox = Outbox()
        self._started_s = 0.0
        """When the oldest step in flight began to execute."""
        self._turned_s = clock.now()
        """When the latest round began."""
        self._beat_s = 0.0
        self._was_idle = True
        self._rests_s: float | None = None
        """Since when nothing is left to do; None while there is, and once `at_rest` was called."""
        self._pause_s = 0.0
        """How long that lasts before it is called."""
        self._is_stopping = False
        self._failure = ""
        self._failed = threading.Event()

    def run(self, ready: Ready) -> None:
        """Serve until `stop`; a failure of the loop itself ends every open request with Fatal."""
        self._link.send([ready])
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
                readable = {fd for fd, _ in poller.poll(self._wait_ms())}
        except Exception as error:
            log.exception("the engine loop failed")
            reason = f"{type(error).__name__}: {error}"
            self._link.send([Fatal(f"The engine failed: {type(error).__name__}: {error}")])
            raise
        finally:
            if self._step_clock is not None:
                self._step_clock.close(reason)
            if self._failure:  # clients have been told; this is for those who look for the cause
                self._watchdogs[0].tell(self._failure)
            for watchdog in self._watchdogs:
                watchdog.close()
            self._launcher.close()
            if self._mover is not None:
                self._mover.close()

    def stop(self) -> None:
        """Ask the loop to end; safe from any thread and from signal handlers."""
        self._is_stopping = True
        self._wake.wake()

    def fail(self, text: str) -> None:
        """Something the engine depends on has died; safe from any thread."""
        self._failure = text
        self._failed.set()
        self._wake.wake()

    def _turn(self, readable: set[int]) -> None:
        """One round. readable: descriptors that polled so."""
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
            for message in self._link.receive():
                self._receive(message, events, now)
        if self._desk is not None:
            self._desk.release(lambda generate: self._admit(generate, now))
        self._marks.end("receive")
        self._collect(events)
        if self._mover is not None:
            for ended in self._mover.ended():
                self._core.receive(ended, now)
            self._mover.look(self._core.take_lookups())
            self._mover.execute(self._core.take_room_orders())
        if self._balancer is not None and (orders := self._balancer.due()):
            self._core.receive(RunControlOps(NO_CALL, orders), now)
        if self._publisher is not None:
            self._publisher.publish(self._core.take_cache_events())
        self._marks.end("commit")
        self._launch()
        if self._mover is not None:
            self._mover.execute(self._core.take_room_orders())
        self._marks.end("plan")
        events += self._core.take_events()
        self._deliver(self._core.take_masks())
        self._beat(events)
        events = self._outbox.pass_on(events, now) + self._outbox.foretell(self._foretold())
        if events:
            self._link.send(events)
        self._marks.end("send", events=len(events))
        if self._rests_s is not None and now - self._rests_s >= self._pause_s:
            self._rests_s, self._pause_s = None, REST_S
            if self._at_rest is not None:
                self._at_rest()

    def _receive(self, message: Message, events: list[Event], now: float) -> None:
        if self._desk is not None and self._desk.keeps(message, events):
            return
        if isinstance(message, Control):
            reply = answer(self._core, message, now)
            if reply is not None:
                events.append(reply)
            return
        is_end = isinstance(message, Abort | StopAt)
        if is_end and self._flying and self._outbox.is_ahead(message.request):
            self._ends.append(message)
            self._end_multi_step()
            return
        self._admit(message, now)

    def _admit(self, message: CoreInput, now: float) -> None:
        if isinstance(message, Generate):
            self._outbox.expect(message)
        self._core.receive(message, now)
        self._end_multi_step()

    def _end_multi_step(self) -> None:
        """Something has come in that the next plan should know of."""
        if self._interrupt is not None and any(plan.steps > 1 for plan in self._plans()):
            self._interrupt(self._plans()[-1].step)

    def _foretold(self) -> list[Tokens]:
        """What the oldest plan in flight has come to so far."""
        if self._so_far is None or not self._flying or not self._flying[0].plan.tell:
            return []
        step = self._flying[0].plan.step
        tokens = self._so_far(step)
        flights = self._core.scheduler.flights.get(step, [])
        return [] if tokens is None else so_far(flights, tokens)

    def _collect(self, events: list[Event]) -> None:
        """Take in every step that is done, oldest first."""
        while self._flying and self._flying[0].is_done():
            handle = self._flying.popleft()
            result, now = handle.result, self._clock.now()
            assert result is not None
            is_shared = self._ranks is not None or self._step_clock is not None
            if result.error and is_shared:
                raise self._out_of_step(result)
            if not handle.plan.orders:
                # Launches run beside the device: the slower of the two sets the pace.
                took = max(handle.launch_s, handle.wait_s) or result.seconds
                self._forecast.measured(handle.tokens, took / _ran(handle.plan, result))
                self._forecast.launched(handle.launch_s)
            told, masks = self._core.complete(result, now)
            if self._crashes_on_nan:
                _check_rows(result)
            events += told
            self._deliver(masks)
            ends, self._ends = self._ends, []
            for message in ends:
                self._admit(message, now)
            if handle.copies is not None:
                self._core.receive(handle.copies, now)
            self._started_s = now
            if self._step_log.counts(handle.plan):
                self._step_log.tell(self._core.stats(now), now)
            if self._check_ledger:
                self._core.check()

    def _out_of_step(self, result: StepResult) -> DeviceError:
        """Why a step failed; when another rank has died, its death says more."""
        if self._step_clock is not None:
            self._step_clock.receive()  # or another replica
        self._failed.wait(BLAME_S)
        told = self._failure or f"step {result.step} failed on rank 0: {result.error}"
        return DeviceError(told, hint="the ranks are no longer in step: start the replica again")

    def _stuck_s(self) -> float:
        """Seconds without a round, or without the end of the step that runs; from any thread.
        Orders take the time that they need."""
        now, plans = self._clock.now(), self._plans()
        is_running = any(not plan.orders for plan in plans)
        return max(now - self._turned_s, now - self._started_s if is_running else 0.0)

    def _queues(self) -> str:
        """As of the latest heartbeat; from any thread."""
        s, waiting = self._stats, len(self._desk) if self._desk is not None else 0
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
                self._step_log.wakes(now)
            self._flying.append(self._launcher.launch(plan))
            self._forecast.planned(self._clock.now() - now)

    def _wait_to_plan(self) -> float:
        if self._go_on is not None:  # a stage without a plan would rest
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
            self._step_log.rests(now)
            self._rests_s = now
            if self._core.recorder is not None:
                self._core.recorder.rested(now)
        elif not is_idle:
            self._rests_s = None
        is_due = now - self._beat_s >= HEARTBEAT_S or (is_idle and not self._was_idle)
        # Who has an answer and asks for the counters finds it in them.
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
        """Idle check: a broken count is reported, and goes on being reported in Stats.leaked."""
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


def _check_rows(result: StepResult) -> None:
    """Raise DeviceError where the logits of a row were not finite."""
    for failure in result.failed:
        if failure.text == NOT_FINITE:
            where = f"row {failure.row} of step {result.step}"
            raise DeviceError(f"{where}: {NOT_FINITE}, and --crash-on-nan is given")


def _ran(plan: StepPlan, result: StepResult) -> int:
    """How many of the steps that a plan holds have run."""
    return 1 if plan.steps == 1 else max([1, *(len(tokens) // 4 for tokens in result.tokens)])
