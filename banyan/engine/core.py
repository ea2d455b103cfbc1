"""EngineCore: three verbs (receive, launch, complete) and a depth. The server, the offline API,
the simulator, replay and the tests all drive this one object.

It never waits, never sleeps and never reads a clock. Depth 1 is synchronous, depth 2 overlaps
planning with execution, 1 + stages is pipeline parallelism.
"""

from collections import deque
from typing import Protocol

from banyan.base.ids import NO_STEP, StepId
from banyan.engine.lockstep import Lockstep
from banyan.messages.events import Event, Stats
from banyan.messages.plan import CopyResult, Mask, StepPlan, StepResult
from banyan.messages.requests import Abort, Generate, RetractAll, StopAt
from banyan.scheduler.scheduler import Scheduler

CoreInput = Generate | Abort | StopAt | CopyResult | RetractAll


class Recorder(Protocol):
    """Takes down everything that decisions depend on, in order (engine/journal.py)."""

    def received(self, message: CoreInput, now: float) -> None: ...
    def launched(self, plan: StepPlan | None, peers: list[int], now: float) -> None: ...
    def completed(self, result: StepResult, now: float) -> None: ...
    def flushed(self, now: float) -> None: ...


class EngineCore:
    """One replica's decisions.

    Args:
        scheduler: what to compute next.
        lockstep: agreement with other replicas; None when there are none.
        recorder: journal; None for none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lockstep: Lockstep | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.depth = scheduler.limits.depth
        self.is_paused = False
        self._lockstep = lockstep
        self._recorder = recorder
        self._in_flight: deque[tuple[StepId, float, bool]] = deque()
        """(step, launched at, has rows), oldest first."""
        self._last_step = NO_STEP

    def receive(self, message: CoreInput, now: float) -> None:
        """Take in a message. Its consequences show in the next launch and in the outboxes."""
        if self._recorder is not None:
            self._recorder.received(message, now)
        match message:
            case Generate():
                self.scheduler.submit(message, now)
            case Abort():
                self.scheduler.abort(message.request, now)
            case StopAt():
                self.scheduler.stop_at(message.request, message.length, now)
            case CopyResult():
                self.scheduler.end_copies(message)
            case RetractAll():
                self.scheduler.roster.retract_all()

    def launch(self, now: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to do, the depth is reached or it is paused.

        A pause leaves no trace in the journal: nothing is decided while it lasts.
        """
        if self.is_paused or self.in_flight >= self.depth:
            return None
        step = StepId(self._last_step + 1)
        draft = self.scheduler.schedule(step, now)
        peers: list[int] = []
        if self._lockstep is not None:
            peers = self._lockstep.agree(sum(row.count for row in draft.rows))
        plan = draft.plan(peers) if draft.has_work or any(peers) else None
        if self._recorder is not None:
            self._recorder.launched(plan, peers, now)
        if plan is not None:
            self._last_step = step
            self.scheduler.cache.horizon.launched = step
            self._in_flight.append((step, now, bool(draft.rows) or any(peers)))
        return plan

    def complete(self, result: StepResult, now: float) -> tuple[list[Event], list[Mask]]:
        """Take in the result of the oldest plan in flight; what it means for front and runner."""
        if self._recorder is not None:
            self._recorder.completed(result, now)
        step, _, _ = self._in_flight.popleft()
        assert result.step == step, f"result of step {result.step}, expected {step}"
        self.scheduler.commit(result, now)
        return self.take_events(), self.take_masks()

    def flush(self, now: float) -> bool:
        """Empty the cache; False (and nothing done) while requests hold pages."""
        if self._recorder is not None:
            self._recorder.flushed(now)
        return self.scheduler.flush()

    def take_events(self) -> list[Event]:
        """Drain the outbox towards the front."""
        roster = self.scheduler.roster
        events, roster.events = roster.events, []
        return events

    def take_masks(self) -> list[Mask]:
        """Drain the outbox towards the runner."""
        roster = self.scheduler.roster
        masks, roster.masks = roster.masks, []
        return masks

    @property
    def in_flight(self) -> int:
        """Plans in flight that count towards the depth; plans with only copies do not."""
        return sum(has_rows for _, _, has_rows in self._in_flight)

    @property
    def oldest_step(self) -> StepId:
        """The step whose result comes next; NO_STEP when none is in flight."""
        return self._in_flight[0][0] if self._in_flight else NO_STEP

    @property
    def is_idle(self) -> bool:
        """No request is alive and nothing is in flight."""
        return self.scheduler.is_idle and self.scheduler.cache.horizon.is_clear

    def check(self) -> None:
        """Raise AssertionError when an invariant of scheduler or memory is broken."""
        self.scheduler.check()

    def stats(self, now: float) -> Stats:
        roster, counters = self.scheduler.roster, self.scheduler.counters
        cache = self.scheduler.cache
        ledgers = [cache.ledger(g) for g in range(len(cache.groups))]
        return Stats(
            steps=counters.steps,
            running=len(roster.running),
            waiting=len(roster.waiting),
            total_pages=sum(x.total for x in ledgers),
            free_pages=sum(x.free for x in ledgers),
            cached_pages=sum(x.cached for x in ledgers),
            held_pages=sum(x.held for x in ledgers),
            in_flight_pages=sum(x.in_flight for x in ledgers),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            computed_tokens=counters.computed_tokens,
            retractions=counters.retractions,
            finished=counters.finished,
            failed=counters.failed,
            step_age_s=now - self._in_flight[0][1] if self._in_flight else 0.0,
            leaked=sum(x.leaked for x in ledgers),
        )
