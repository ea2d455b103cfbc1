"""EngineCore: decides what one replica computes. Its three verbs are receive, launch and complete.

The server, the offline API, the simulator, replay and the tests all drive this object. It never
waits and never reads a clock. Depth 1 is synchronous; depth 2 overlaps planning with execution;
each further pipeline stage adds one plan.
"""

from collections import deque
from typing import Protocol

from banyan.base.ids import NO_STEP, StepId
from banyan.dp_attention.step_clock import StepAgreement
from banyan.kv_cache.cache import weights_id
from banyan.lora.scheduling import change_adapters, end_adapters, wanted_adapters
from banyan.messages.control_ops import (
    KV_CACHE,
    WEIGHTS,
    AttachStore,
    ControlOp,
    ControlOpReply,
    DetachStore,
    DropAdapter,
    ReleaseMemory,
    ResumeMemory,
    TakeAdapter,
    TakeWeights,
)
from banyan.messages.disaggregation import (
    PrefillResult,
    TransferClosed,
    TransferFailed,
    TransferFound,
)
from banyan.messages.events import Event, Reply, Stats
from banyan.messages.plan import CopyResult, Held, Mask, StepLoad, StepPlan, StepResult
from banyan.messages.requests import (
    NO_CALL,
    Abort,
    Generate,
    LoadAdapter,
    RetractAll,
    RunControlOps,
    StopAt,
    UnloadAdapter,
    Unpin,
)
from banyan.scheduler.request import DraftCounts
from banyan.scheduler.scheduler import Scheduler
from banyan.scheduler.step_plan_builder import StepPlanBuilder

_Request = (
    Generate | Abort | StopAt | RetractAll | Unpin | RunControlOps | LoadAdapter | UnloadAdapter
)
_Report = CopyResult | Held | TransferFound | PrefillResult | TransferFailed | TransferClosed
CoreInput = _Request | _Report


class CoreRecorder(Protocol):
    """Records everything that decisions depend on, in order (engine/journal.py)."""

    def received(self, message: CoreInput, now: float) -> None: ...
    def launched(
        self, plan: StepPlan | None, peers: list[StepLoad] | None, now: float, is_paused: bool
    ) -> None: ...
    def completed(self, result: StepResult, now: float) -> None: ...
    def flushed(self, now: float) -> None: ...
    def rested(self, now: float) -> None: ...


class EngineCore:
    """The decisions of one replica.

    Args:
        step_agreement: agreement with the other replicas of DP attention; None without.
        recorder: journal or flight recorder; None without.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_agreement: StepAgreement | None = None,
        recorder: CoreRecorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.depth = scheduler.limits.depth
        self.is_paused = False
        self.released: list[str] = []
        """Tags of released memory (messages/control_ops.py); while any is, no rows are planned."""
        self._step_agreement = step_agreement
        self.recorder = recorder
        self._in_flight: deque[tuple[StepId, float, bool]] = deque()
        """(step, launched at, has rows), oldest first."""
        self._last_step = NO_STEP
        self._queued_ops: deque[RunControlOps] = deque()
        self._running_ops: RunControlOps | None = None
        """Control ops of the plan in flight."""
        self._held: StepPlanBuilder | None = None
        """A drafted plan that waits for the agreement of the other replicas."""
        self._held_s = 0.0

    def receive(self, message: CoreInput, now: float) -> None:
        """Take in a message. It takes effect in the next launch and in the outboxes."""
        if self.recorder is not None:
            self.recorder.received(message, now)
        match message:
            case Generate():
                self.scheduler.submit(message, now)
            case Abort():
                self.scheduler.abort(message.request, now)
            case StopAt():
                self.scheduler.stop_at(message.request, message.length, now)
            case CopyResult():
                self.scheduler.on_copies_ended(message)
            case Held():
                self.scheduler.store_fetcher.on_lookup_reply(message)
            case TransferFound() | PrefillResult() | TransferFailed() | TransferClosed():
                self.scheduler.on_kv_transfer(message, now)
            case RetractAll():
                self.scheduler.request_table.retract_all()
            case Unpin():
                self.scheduler.cache.pins.unpin(message.request)
            case RunControlOps():
                self._queued_ops.append(message)
            case LoadAdapter() | UnloadAdapter():
                change_adapters(self.scheduler.adapters, self.scheduler.request_table, message)
        self._queue_adapter_ops()

    def launch(self, now: float) -> StepPlan | None:
        """Make the next plan.

        Returns:
            None if there is nothing to do, the depth is reached, the engine is paused, or other
            replicas have not agreed yet (the drafted plan is kept for the next call).

        Control ops get a plan of their own, which is alone in flight. During a pause nothing is
        decided; the journal then records only steps of other replicas in which this one takes part.
        """
        if self._held is None and not self._may_launch():
            return None
        was_held = self._held is not None
        builder = self._held or self._next_builder(now)
        peers: list[StepLoad] | None = []
        if self._step_agreement is not None and not builder.control_ops:
            peers = self._step_agreement.agree(builder.load)
        self._held = builder if peers is None else None
        plan = None
        if peers or (builder.has_work and peers is not None):
            plan = builder.plan(peers)
        if was_held:
            is_recorded = peers is not None
        else:
            is_recorded = plan is not None or peers is None or self._may_plan
        if self.recorder is not None and is_recorded:
            self.recorder.launched(plan, peers, now, self.is_paused)
        if plan is not None:
            self._last_step = plan.step
            self.scheduler.cache.epochs.launched = plan.step
            self._in_flight.append(
                (plan.step, now, bool(plan.rows or plan.pieces or plan.replica_loads))
            )
        return plan

    def _queue_adapter_ops(self) -> None:
        """Queue the control ops that load and unload adapters, if no other op is queued.

        Called only after an input, so that the journal reproduces the decision.
        """
        adapters = self.scheduler.adapters
        if adapters is None or self._queued_ops or self._running_ops is not None:
            return
        wanted = wanted_adapters(adapters, self.scheduler.request_table)
        if wanted is not None:
            self._queued_ops.append(wanted)

    def _next_builder(self, now: float) -> StepPlanBuilder:
        """Draft the next plan; from here on its rows count as launched."""
        step = StepId(self._last_step + 1)
        self._held_s = now
        if self._queued_ops:
            return self._control_op_plan(step)
        if not self._may_plan:
            return StepPlanBuilder(step, [], 0)
        builder = self.scheduler.schedule(step, now)
        if builder.has_work:
            self.scheduler.cache.epochs.launched = step
        return builder

    def complete(self, result: StepResult, now: float) -> tuple[list[Event], list[Mask]]:
        """Commit the result of the oldest plan in flight; returns events and masks."""
        if self.recorder is not None:
            self.recorder.completed(result, now)
        step, _, _ = self._in_flight.popleft()
        assert result.step == step, f"result of step {result.step}, expected {step}"
        self.scheduler.commit(result, now)
        if self._running_ops is not None:
            self._end_control_ops(self._running_ops, result)
        self._queue_adapter_ops()
        return self.take_events(), self.take_masks()

    def flush(self, now: float) -> bool:
        """Empty the cache except pinned pages; False if requests hold pages (nothing happens)."""
        if self.recorder is not None:
            self.recorder.flushed(now)
        return self.scheduler.flush(keeps_pins=True)

    def take_events(self) -> list[Event]:
        """Drain the outbox towards the client."""
        request_table, disaggregation = self.scheduler.request_table, self.scheduler.disaggregation
        events, request_table.events = request_table.events, []
        if disaggregation is not None:
            events += disaggregation.delayed_ends
            disaggregation.delayed_ends = []
        return events

    def take_masks(self) -> list[Mask]:
        """Drain the outbox towards the runner. Masks of a held plan stay with it."""
        request_table = self.scheduler.request_table
        masks, request_table.masks = request_table.masks, []
        if self._held is not None:
            step = self._held.step
            self._held.masks += [mask for mask in masks if mask.step == step]
            masks = [mask for mask in masks if mask.step != step]
        return masks

    @property
    def uses_dp_attention(self) -> bool:
        """Whether every step needs the agreement of other replicas."""
        return self._step_agreement is not None

    @property
    def in_flight(self) -> int:
        """Plans in flight that count towards the depth: those with rows."""
        return sum(has_rows for _, _, has_rows in self._in_flight)

    @property
    def oldest_step(self) -> StepId:
        """The step whose result is due next; NO_STEP if none is in flight."""
        return self._in_flight[0][0] if self._in_flight else NO_STEP

    @property
    def is_idle(self) -> bool:
        """No request is alive and nothing is in flight."""
        return self.scheduler.is_idle and self.scheduler.cache.epochs.is_clear

    def check(self) -> None:
        """Raise AssertionError if an invariant of scheduler or cache is broken."""
        self.scheduler.check()

    def stats(self, now: float) -> Stats:
        request_table, counters = self.scheduler.request_table, self.scheduler.counters
        cache, adapters = self.scheduler.cache, self.scheduler.adapters
        speculation, disaggregation = self.scheduler.speculation, self.scheduler.disaggregation
        drafts = DraftCounts() if speculation is None else speculation.drafts
        ledgers = cache.ledgers
        return Stats(
            steps=counters.steps,
            running=len(request_table.running),
            waiting=len(request_table.waiting),
            total_pages=sum(x.total for x in ledgers),
            free_pages=sum(x.free for x in ledgers),
            cached_pages=sum(x.cached for x in ledgers),
            held_pages=sum(x.held for x in ledgers),
            in_flight_pages=sum(x.in_flight for x in ledgers),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            stored_tokens=counters.stored_tokens,
            output_tokens=counters.output_tokens,
            computed_tokens=counters.computed_tokens,
            retractions=counters.retractions,
            finished=counters.finished,
            failed=counters.failed,
            step_age_s=self._step_age_s(now),
            leaked=sum(x.leaked for x in ledgers),
            verify_rows=drafts.steps,
            proposed_drafts=drafts.proposed,
            correct_drafts=drafts.correct,
            pinned_pages=cache.pins.pages if cache.pins.by_name else 0,
            adapters=0 if adapters is None else adapters.num_loaded,
            adapter_bytes=0 if adapters is None else adapters.used_bytes,
            open_rooms=0 if disaggregation is None else len(disaggregation),
        )

    def _may_launch(self) -> bool:
        if self._running_ops is not None:
            return False
        if self._queued_ops:
            return self.scheduler.cache.epochs.is_clear
        return (self._may_plan or self.uses_dp_attention) and self.in_flight < self.depth

    @property
    def _may_plan(self) -> bool:
        """Whether rows may be planned."""
        return not self.is_paused and not self.released

    def _control_op_plan(self, step: StepId) -> StepPlanBuilder:
        """A plan of the oldest queued control ops. If they release pages, requests recompute."""
        self._running_ops = self._queued_ops.popleft()
        builder = StepPlanBuilder(step, [], 0)
        builder.control_ops = self._running_ops.ops
        if any(_takes_pages(order) for order in builder.control_ops):
            self.scheduler.request_table.retract_all()
            self.scheduler.flush()
        return builder

    def _end_control_ops(self, ops: RunControlOps, result: StepResult) -> None:
        """Apply the control ops that succeeded and queue the reply."""
        self._running_ops = None
        done = [reply for reply in result.replies if reply.ok]
        for order, reply in zip(ops.ops, done, strict=False):
            self._apply(order, reply)
        ok = len(done) == len(ops.ops)
        shown = done if ok else [reply for reply in result.replies if not reply.ok]
        text = result.error or " ".join(reply.text for reply in shown)
        body = done[-1].body if ok and done else b""
        again = end_adapters(
            self.scheduler.adapters, self.scheduler.request_table, ops, ok, shown, text
        )
        if again is None or ops.call == NO_CALL:
            return
        text = again
        self.scheduler.request_table.events.append(Reply(ops.call, ok, text, body))

    def _apply(self, order: ControlOp, reply: ControlOpReply) -> None:
        match order:
            case TakeAdapter() | DropAdapter():
                assert self.scheduler.adapters is not None
                self.scheduler.adapters.done(order, reply)
            case TakeWeights(is_trial=True) | ReleaseMemory(is_trial=True):
                pass
            case TakeWeights():
                if order.flush:
                    self.scheduler.flush()
                self.scheduler.cache.pins.unpin()  # pages of other weights are of no use
                self.scheduler.cache.weights = weights_id(order.version)
                self.scheduler.contents.forget_since(NO_STEP)
                self._mark_resumed([WEIGHTS])
            case ReleaseMemory():
                self.released += [tag for tag in order.tags if tag not in self.released]
            case ResumeMemory():
                self._mark_resumed(order.tags)
            case AttachStore(is_trial=False):
                self.scheduler.store_fetcher.attach(order)
            case DetachStore(is_trial=False):
                self.scheduler.store_fetcher.detach()
            case _:
                pass

    def _mark_resumed(self, tags: list[str]) -> None:
        self.released = [tag for tag in self.released if tag not in tags]

    def _step_age_s(self, now: float) -> float:
        """Age of the oldest launched or held step; control ops have no time limit."""
        if self._in_flight and self._running_ops is None:
            return now - self._in_flight[0][1]
        return now - self._held_s if self._held is not None else 0.0


def _takes_pages(order: ControlOp) -> bool:
    return isinstance(order, ReleaseMemory) and KV_CACHE in order.tags and not order.is_trial
