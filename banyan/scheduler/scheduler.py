"""Scheduler: decides what each step computes, and assigns all slots and pages.

`schedule` builds the next plan: running requests first, then new ones. `commit` processes a result.
The same calls always lead to the same plans: there is no clock, no randomness, and no dependence on
object addresses. Text, tensors, sockets and model families are handled elsewhere.
"""

from array import array
from collections import Counter

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId, StepId
from banyan.disaggregation.scheduling import DECODE, disaggregation_side
from banyan.grammar.base import Grammar, GrammarFactory
from banyan.kv_cache.cache import KVCache, Match
from banyan.lora.scheduling import Adapters
from banyan.messages.disaggregation import (
    KVTransferEvent,
    KVTransferOp,
    PrefillResult,
    TransferFailed,
)
from banyan.messages.events import Failed
from banyan.messages.plan import CopyResult, Join, RowFailure, RowScores, StepResult
from banyan.messages.requests import Generate
from banyan.pipeline.micro_batches import MicroBatches
from banyan.scheduler.admission import (
    Admission,
    check_request,
    explain_miss,
    fail_overdue,
    prefix_of,
    victims,
)
from banyan.scheduler.budget import NewTokenRatio, SchedulerLimits
from banyan.scheduler.hicache_fetch import StoreFetcher
from banyan.scheduler.output_processor import OutputProcessor
from banyan.scheduler.request import RUNNING, Flight, Request
from banyan.scheduler.request_table import RequestTable
from banyan.scheduler.row_planner import Planned, RowPlanner, choose_steps
from banyan.scheduler.schedule_policy import FairQueue, SchedulePolicy
from banyan.scheduler.spans import SpanContents
from banyan.scheduler.speculation import Speculation
from banyan.scheduler.step_plan_builder import StepPlanBuilder


class Scheduler:
    """Schedules the requests of one replica.

    Args:
        policy: order in which waiting requests are tried.
        grammars: compiles `Generate.grammar`; None without a grammar backend.
        role: PREFILL or DECODE of disaggregation/scheduling.py; "" = no disaggregation.
        adapters: LoRA adapters; None when they are disabled.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        policy: SchedulePolicy,
        grammars: GrammarFactory | None = None,
        role: str = "",
        adapters: Adapters | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.adapters = adapters
        self.request_table = RequestTable(
            cache,
            limits.max_running,
            is_drafting=limits.drafts > 0,
            has_stages=limits.token_gap > 0,
        )
        self.counters = self.request_table.counters
        self.flights: dict[StepId, list[Flight]] = {}
        """Rows in flight, by step."""
        self.store_fetcher = StoreFetcher(cache)
        self.disaggregation = disaggregation_side(
            role, cache, limits.chunk_tokens, limits.polling_interval
        )
        self.request_table.on_end = self._on_end
        self.speculation: Speculation | None = None
        if limits.drafts:
            self.speculation = Speculation(
                most=limits.drafts,
                is_paid=limits.paid_drafts,
                is_fixed=limits.fixed_drafts,
                levels=limits.draft_levels,
                in_blocks=limits.block_drafts,
            )
        self._policy = policy
        self._is_decode = role == DECODE
        self._fair_queue = FairQueue(limits.priorities.max_wait_s)
        self._grammars = grammars
        self._ratio = NewTokenRatio(limits.conservativeness, limits.growth)
        self._admission = Admission(cache, limits, self._ratio)
        has_stages = limits.token_gap > 0 or limits.micro_batch > 0
        self._micro_batches = MicroBatches(limits) if has_stages else None
        self.contents = SpanContents(limits.content, limits.chunk_tokens, limits.whole_prompts)
        self._planner = RowPlanner(
            cache, limits, self.request_table, self.contents, self.speculation
        )
        self._outputs = OutputProcessor(
            cache, self.request_table, self.disaggregation, limits.depth
        )
        self._has_suspects = False
        self._arrivals = 0
        self._now = 0.0

    # -- requests and events ------------------------------------------------------------------

    def submit(self, generate: Generate, now: float) -> None:
        """Queue a request, or refuse it with an event."""
        try:
            check_request(generate, self.request_table, self.cache, self.limits, self.adapters)
            if generate.spans or generate.contents:
                self.contents.check(generate)
            if self.adapters is not None:
                generate = self.adapters.received(generate)
            if self.disaggregation is not None:
                generate = self.disaggregation.prepare(generate)
            grammar = self._compile(generate.grammar)
        except RequestError as error:
            if self.disaggregation is not None:
                self.disaggregation.on_refused(generate)
            self.contents.refuse(generate)
            self.counters.failed += 1
            refused = Failed(generate.request, error.status, str(error), error.code)
            self.request_table.events.append(refused)
            return
        self._arrivals += 1
        namespace = generate.namespace
        if self.cache.isolates_requests:
            namespace += self._arrivals.to_bytes(8, "little")
        request = Request(
            generate,
            grammar,
            priority=self.limits.priorities.of(generate.priority),
            now=now,
            order=self._arrivals,
            namespace=namespace,
        )
        self._fair_queue.join(request, self.request_table.alive)
        self.request_table.add(request)
        if generate.contents:
            self.contents.add(request)
        has_prompt_elsewhere = self._is_decode and bool(generate.transfer_id)
        if self.cache.tier is not None and not has_prompt_elsewhere:
            self.store_fetcher.look_up(request, now)
        if self.disaggregation is not None:
            self.disaggregation.on_queued(request)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End a request in any state. Unknown ids have ended already."""
        request = self.request_table.find(request_id)
        if request is not None:
            self.request_table.finish(request, "abort", now)
        elif self.disaggregation is not None:
            self.disaggregation.cancel(request_id)

    def stop_at(self, request_id: RequestId, length: int, now: float) -> None:
        """A stop string matched in the API process: keep `length` output tokens and finish."""
        request = self.request_table.find(request_id)
        if request is not None:
            keep = max(0, min(length, request.output_len))
            self.request_table.finish(request, "stop", now, cut_at=request.prompt_len + keep)

    def on_copies_ended(self, result: CopyResult) -> None:
        if self.cache.tier is not None:
            self.store_fetcher.note_read(len(result.ids), result.seconds)
        self.cache.end_copies(result.ids, result.failed)
        if self.disaggregation is not None:
            self.disaggregation.on_copies_ended()

    def on_kv_transfer(self, event: KVTransferEvent, now: float) -> None:
        """Process an event of the KV transfer mover."""
        request = None if self.disaggregation is None else self.disaggregation.on_event(event)
        if request is None:
            return
        if isinstance(event, PrefillResult):
            request.stats.cached_tokens = event.cached_tokens
            self._outputs.process(request, array("i", event.tokens), event.scores, now)
        elif isinstance(event, TransferFailed):
            self.request_table.fail(request, event.status, event.text, event.code)

    def take_transfer_ops(self) -> list[KVTransferOp]:
        """Drain the outbox towards other servers."""
        if self.disaggregation is None:
            return []
        ops, self.disaggregation.ops = self.disaggregation.ops, []
        return ops

    def _on_end(self, request: Request) -> None:
        if request.generate.contents:
            self.contents.drop(request)
        if self.disaggregation is not None:
            self.disaggregation.on_ended(request)

    def flush(self, keeps_pins: bool = False) -> bool:
        """Empty the cache; False (and only pins dropped) while requests hold pages."""
        if not keeps_pins:
            self.cache.pins.unpin()
        table = self.request_table
        if table.running or any(request.flights for request in table.waiting):
            return False
        self.cache.flush()
        return True

    @property
    def is_idle(self) -> bool:
        return not len(self.request_table)

    def check(self) -> None:
        """Raise AssertionError when a page, slot or request is counted wrongly."""
        self.request_table.check()
        if self.contents.items:
            self.contents.check_counts(self.request_table.alive)
        if self.adapters is not None:
            self.adapters.check()

    # -- one step -----------------------------------------------------------------------------

    def schedule(self, step: StepId, now: float) -> StepPlanBuilder:
        """Build the plan of `step`. A plan without work is not launched."""
        self._now = now
        limits, table, cache = self.limits, self.request_table, self.cache
        fail_overdue(table, limits, now)
        table.slots.free_lingering()
        if cache.pins.by_name:
            cache.pins.expire(now)
        builder = StepPlanBuilder(
            step=step,
            leaves=table.slots.leaves,
            chunk_tokens=limits.chunk_tokens,
            max_prompts=limits.max_prompts,
            running=len(table.running),
            draft_budget=limits.draft_budget,
        )
        if self.disaggregation is not None:
            self.disaggregation.before_step(table.running, table.waiting, len(table.slots.free))
        suspect = self._suspect()
        if suspect is not None:
            self._run_alone(suspect, builder)
        else:
            self._preempt()
            builder.steps, builder.report_every = choose_steps(table, limits)
            self._plan_running(builder)
            self._admit(builder)
        for request, cost in self.contents.worked:
            self._fair_queue.charge(request, cost)
        self.contents.worked.clear()
        # Copies off the device come first: this plan may give their pages to another request.
        if cache.tier is not None:
            builder.copies[:0] = cache.tier.take_copies(bool(builder.rows))
        if cache.peers is not None:
            builder.copies[:0] = cache.peers.take_copies()
        if builder.has_work:
            builder.forget, self.contents.forgotten = self.contents.forgotten, []
            table.slots.leaves = []
            self.flights[step] = builder.flights
            self.counters.steps += 1
            self.counters.computed_tokens += sum(row.count for row in builder.rows)
            if builder.has_decode:
                self._ratio.decay()
        return builder

    def commit(self, result: StepResult, now: float) -> None:
        """Process the result of the oldest step in flight."""
        self._now = now
        flights = self.flights.pop(result.step, [])
        if self.cache.tier is not None:
            self.store_fetcher.note_step(sum(f.tokens for f in flights), result.seconds)
        if result.error:
            self._fail_step(result, flights)
            return
        for spoilt in result.spoilt:
            for request in self.contents.spoil(spoilt.content):
                self.request_table.fail(
                    request, spoilt.status, f"The request failed: {spoilt.text}"
                )
        for failure in result.failed:
            self._fail_row(flights[failure.row], failure)
        self.cache.settle(result.step)
        if self.speculation is not None and (tokens_run := _decode_tokens(flights)):
            self.speculation.learn_times(tokens_run, flights, result)
        scores: dict[int, list[RowScores]] = {}
        for score in result.scores:
            scores.setdefault(score.row, []).append(score)
        for flight in flights:
            if not flight.is_void:
                self._commit_row(flight, result, scores.get(flight.row, []))
        if not len(self.request_table):
            self._ratio.reset()

    def _commit_row(self, flight: Flight, result: StepResult, scores: list[RowScores]) -> None:
        """Append the output of a row to its request, report it, and end the request if it is
        complete.
        """
        request, row = flight.request, flight.row
        assert request.flights[0] is flight
        request.flights.popleft()
        tokens = array("i", result.tokens[row])
        if flight.samples:
            drafting = request.drafting
            if self.speculation is not None and flight.is_decode:
                verified = min(flight.samples - 1, len(drafting.tokens))
                self.speculation.learn_acceptance(request, verified, tokens)
            # Also for a retracted request: rows in flight may need masks for these drafts.
            drafts = result.drafts[row] if result.drafts else b""
            parents = result.parents[row] if result.parents else b""
            drafting.tokens, drafting.parents = list(array("i", drafts)), list(array("i", parents))
            if request.lease is not None:
                request.planned -= flight.samples - len(tokens)  # rejected drafts
                request.has_sampled = True
        request.is_suspect = request.is_suspect and not flight.samples
        request.hidden_to = max(request.hidden_to, flight.hidden[1])
        before = request.output_len
        self._outputs.process(
            request,
            tokens,
            scores,
            self._now,
            vector=result.vectors[row] if result.vectors else b"",
            hidden=result.hidden[row] if result.hidden else b"",
            hidden_first=flight.hidden[0],
        )
        self._fair_queue.charge(request, flight.tokens + request.output_len - before)

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, builder: StepPlanBuilder) -> None:
        running = self.request_table.running
        batches = self._micro_batches
        for request in list(running) if batches is None else batches.select(running, builder):
            if request.state != RUNNING:
                continue  # retracted for a request of higher rank
            if self._planner.plan(request, builder) is Planned.STARVED:
                self._make_way(request, builder)
                if request.state == RUNNING:
                    self._planner.plan(request, builder)  # retracted pages may be free at once
        builder.is_starved = builder.is_starved and bool(self.request_table.running)

    def _make_way(self, starved: Request, builder: StepPlanBuilder) -> None:
        """Retract requests until the pages that `starved` lacks are free or on their way back.

        Requests with a row in this very step are not retracted: with pipeline stages, lower ranks
        may be planned already. Then `starved` waits, and goes first in the next step.
        """
        running, cache = self.request_table.running, self.cache
        missing, lower = builder.missing_pages, victims(running, starved)
        idle = [victim for victim in lower if victim.latest_step != builder.step]
        for victim in idle:
            if cache.capacity.has(missing):
                return
            self.request_table.retract(victim)
        if cache.capacity.has(missing) or len(idle) < len(lower):
            return
        assert starved.lease is not None
        if len(running) > 1 or starved.lease.has_copies(cache.groups, cache.block_size):
            self.request_table.retract(starved)
        elif cache.epochs.is_clear and not cache.pins.evict_one():
            text = f"needs {missing} more pages, which the cache does not have"
            self.request_table.fail(starved, 500, text, "out_of_pages")
        self._ratio.on_retraction(running)

    def _preempt(self) -> None:
        """Retract the lowest running request if a waiting one of far higher priority does not fit.

        One at a time, and none while pages of a retracted one are still on their way back.
        """
        gap, table = self.limits.priorities.preemption_gap, self.request_table
        if not table.waiting or not table.running:
            return
        if not table.slots.free and self.disaggregation is None:
            self._preempt_for_caller()
        first, lowest = table.waiting[0], table.running[-1]
        if not gap or self._is_blocked(first):
            return
        is_far_above = first.priority - lowest.priority >= gap
        if not is_far_above or any(r.flights for r in table.waiting):
            return
        reserved = self._admission.reserve(table.running)
        match = prefix_of(first, self.cache).whole_blocks
        if not table.slots.free or not self._admission.fits(first, match, reserved):
            table.retract(lowest)

    def _preempt_for_caller(self) -> None:
        """Retract the newest request of the caller with most slots if another caller has none.

        Only for a caller whose turn comes first, so that it gets the slot.
        """
        table, held = self.request_table, Counter(r.caller for r in self.request_table.running)
        if not self._fair_queue.callers - held.keys():
            return
        heaviest = max(held, key=held.__getitem__)
        last = next(r for r in reversed(table.running) if r.caller == heaviest)
        first = next((r for r in table.waiting if r.caller not in held), None)
        if first is None or held[heaviest] < 2 or first.priority < last.priority:
            return
        is_late = any(r.flights for r in table.waiting) or self._is_blocked(first)
        if not is_late and self._fair_queue.is_before(first, heaviest):
            table.retract(last)

    # -- new requests -------------------------------------------------------------------------

    def _admit(self, builder: StepPlanBuilder) -> None:
        table, admission = self.request_table, self._admission
        if builder.is_starved or not table.waiting:
            return
        has_store = self.cache.tier is not None and self.cache.tier.is_attached
        if not table.slots.free and not has_store:
            return  # the usual case in an overload: sorting a long queue would take time
        reserved = admission.reserve(table.running)
        if has_store:
            self.store_fetcher.start_loads(
                table.waiting, lambda request, match: admission.fits(request, match, reserved)
            )
        if not table.slots.free:
            return
        ordered = self._policy(table.waiting, self._probe)
        for request in self._fair_queue.interleave(ordered, self._now):
            if request.flights or self._is_blocked(request):
                continue  # retracted with its last token in flight, or waiting for something
            batches = self._micro_batches
            is_full = builder.budget <= 0 or (batches is not None and batches.is_full(builder))
            if is_full or not table.slots.free:
                return
            if not self._has_features(request, builder):
                continue
            while not self._enter(request, builder, reserved):
                if table.running or not self.cache.pins.evict_one():
                    return
            for g, pages in enumerate(admission.reserve([request])):
                reserved[g] += pages

    def _enter(self, request: Request, builder: StepPlanBuilder, reserved: list[int]) -> bool:
        """Give the request a slot, a lease and its first row; False (and nothing changed) if it
        does not fit.
        """
        if not self._has_adapter_place(request):
            return False
        match = prefix_of(request, self.cache)
        if not self._admission.fits(request, match, reserved):
            match = match.whole_blocks  # the block to copy from may have to be evicted
            if not self._admission.fits(request, match, reserved):
                return False
        stats = request.stats
        if stats.admitted_s is None and request.incoming is None:
            stats.cache_miss, stats.missed_eviction = explain_miss(request, self.cache, match)
        slot = self.request_table.slots.free.pop()
        generate = request.generate
        lease, grants = self.cache.lease(slot, request.namespace, match, generate.priority)
        self.request_table.enter(request, slot, lease, match.tokens)
        at_grants = len(builder.grants)
        restores = match.partial is not None or (self.cache.has_state and match.tokens > 0)
        if self._planner.plan(request, builder, restores) is not Planned.ROW:
            self.request_table.undo_enter(request)
            return False
        builder.grants[at_grants:at_grants] = grants
        builder.joins.append(
            Join(
                slot=slot,
                tokens=bytes(request.tokens),
                prompt_len=request.prompt_len,
                sampling=request.sampling,
                score_top=generate.score_top,
                score_ids=generate.score_ids,
                adapter=0 if self.adapters is None else self.adapters.enter(request),
                spans=self.contents.placed(request) if generate.spans else b"",
                namespace=generate.namespace if self.limits.drafts else b"",
            )
        )
        if stats.admitted_s is None:
            stats.admitted_s = self._now
            if request.incoming is None:
                stats.cached_tokens = match.tokens
            if request.fetch is not None:
                stats.stored_tokens = self.store_fetcher.stored_tokens(request, match)
            self.counters.cached_tokens += match.tokens
            self.counters.stored_tokens += stats.stored_tokens
        return True

    def _has_features(self, request: Request, builder: StepPlanBuilder) -> bool:
        """Whether its first row can run; plans the work for its features otherwise."""
        if not request.generate.spans:
            return True
        start, running = prefix_of(request, self.cache).tokens, self.request_table.running
        is_whole = self.limits.whole_prompts
        first = request.known if is_whole else start + 1
        if self.contents.reach(request, start, first) < first:
            self.contents.prepare(request, start, builder, running)
        reached = self.contents.reach(request, start, first)
        return reached == first if is_whole else reached > start and builder.budget > 0

    def _is_blocked(self, request: Request) -> bool:
        """Whether it waits for its adapter, for the store, or for its KV transfer."""
        if not self._has_adapter_place(request):
            return True
        if self.disaggregation is not None and self.disaggregation.is_blocked(request):
            return True
        return request.fetch is not None and self.store_fetcher.is_blocked(request, self._now)

    def _has_adapter_place(self, request: Request) -> bool:
        """Whether the request needs no adapter that is not there yet."""
        running = self.request_table.running
        return self.adapters is None or self.adapters.may_enter(request, running, self._now)

    def _probe(self, request: Request) -> Match:
        return prefix_of(request, self.cache)

    def _compile(self, text: str) -> Grammar | None:
        if not text:
            return None
        if self._grammars is None:
            raise RequestError("Constrained output is not available: no grammar backend is loaded")
        return self._grammars(text)

    # -- failures -----------------------------------------------------------------------------

    def _fail_row(self, flight: Flight, failure: RowFailure) -> None:
        """Fail the request of a row. Requests that share its promised pages recompute."""
        if not flight.is_void:
            if flight.restores:
                flight.request.starts_over = True
                self.request_table.recompute(flight.request)
            else:
                self.request_table.fail(flight.request, failure.status, failure.text)
        self._drop_promises(flight.step, flight.request.id)

    def _fail_step(self, result: StepResult, flights: list[Flight]) -> None:
        """A whole step failed: recompute every request, and run its requests one at a time."""
        alive = [f.request for f in flights if not f.is_void]
        if len(alive) == 1:
            self.request_table.fail(alive[0], 500, result.error)
        else:
            for request in alive:
                request.is_suspect = self._has_suspects = True
        self._drop_promises(result.step, "")
        self.contents.forget_since(result.step)
        self.cache.settle(result.step)
        for request in list(self.request_table.running):
            self.request_table.recompute(request)
        for request in self.request_table.waiting:
            self.request_table.void(request)

    def _suspect(self) -> Request | None:
        """The oldest request that took part in a failed step and has not succeeded since."""
        if self._has_suspects:
            for request in self.request_table.waiting + self.request_table.running:
                if request.is_suspect:
                    return request
            self._has_suspects = False
        return None

    def _run_alone(self, suspect: Request, builder: StepPlanBuilder) -> None:
        """Run one suspect by itself, to find the request that makes steps fail."""
        if self.flights:
            return
        if suspect.state == RUNNING:
            if self._planner.plan(suspect, builder) is Planned.STARVED:
                self._make_way(suspect, builder)
            if suspect.state == RUNNING:
                return
        nothing = [0] * len(self.cache.groups)
        while not self._enter(suspect, builder, nothing):
            if self.request_table.running:
                self.request_table.retract(self.request_table.running[-1])
            elif not self.cache.pins.evict_one():
                return

    def _drop_promises(self, step: StepId, writer: str) -> None:
        """Drop pages that a failed step promised, and recompute every request that uses them."""
        if not self.cache.forget_promises(step, writer):
            return
        for request in list(self.request_table.running):
            assert request.lease is not None
            if not all(node.is_attached for node in request.lease.path):
                self.request_table.recompute(request)
        for request in self.request_table.waiting:
            self.request_table.void(request)  # retracted: the pages it read are not known any more


def _decode_tokens(flights: list[Flight]) -> int:
    """Tokens of a step in which every row began at its request's newest token; 0 for others."""
    if not all(flight.is_decode and not flight.is_void for flight in flights):
        return 0
    return sum(1 + min(f.samples - 1, len(f.request.drafting.tokens)) for f in flights)
