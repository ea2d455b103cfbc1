"""Scheduler: decides what every step computes. The only giver of slots and pages.

Given the same calls it makes the same plans: no clock, no randomness, no address order. Knows
nothing of text, tensors, sockets or model families.
"""

from array import array

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId, StepId
from banyan.disaggregation.scheduling import disaggregation_side
from banyan.grammar.base import Grammar, GrammarFactory
from banyan.kv_cache.cache import KVCache, Match
from banyan.lora.scheduling import Adapters, has_place
from banyan.messages.disaggregation import KVTransferEvent, PrefillResult, TransferFailed
from banyan.messages.plan import (
    CopyResult,
    Join,
    RowFailure,
    RowScores,
    StepResult,
)
from banyan.messages.requests import Generate
from banyan.pipeline.micro_batches import MicroBatches
from banyan.scheduler.admission import may_enter, prefix_of, reserve, victims, why_no_more
from banyan.scheduler.budget import Limits, NewTokenRatio
from banyan.scheduler.fair_queue import FairQueue, end_overdue
from banyan.scheduler.hicache_fetch import StoreFetcher
from banyan.scheduler.multi_step import steps_of_a_multi_step
from banyan.scheduler.outputs import OutputProcessor
from banyan.scheduler.queue_limits import check_request
from banyan.scheduler.queue_order import QueueOrder
from banyan.scheduler.request import RUNNING, Flight, Request
from banyan.scheduler.request_table import RequestTable
from banyan.scheduler.row_planner import Planned, RowPlanner
from banyan.scheduler.speculation import Speculation
from banyan.scheduler.step_plan_builder import StepPlanBuilder


class Scheduler:
    """Decides over the requests and the cache of one replica.

    Args:
        cache: pages and prefixes.
        limits: what may not be exceeded.
        order: in which order waiting requests are tried.
        grammars: compiles `Generate.grammar`; None when there is no backend.
        role: PREFILL or DECODE of disaggregation/scheduling.py; "" = prompts are computed and
        continued here. adapters: which there are; None where requests may name none.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        order: QueueOrder,
        grammars: GrammarFactory | None = None,
        role: str = "",
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters
        self.cache = cache
        self.limits = limits
        has_stages = limits.token_gap > 0
        self.request_table = RequestTable(cache, limits.max_running, limits.drafts > 0, has_stages)
        self.counters = self.request_table.counters
        self._order = order
        self._turns = FairQueue(limits.priorities.max_wait_s)
        self._grammars = grammars
        self.flights: dict[StepId, list[Flight]] = {}
        """In flight, by step."""
        self.store_fetcher = StoreFetcher(cache)
        self.disaggregation = disaggregation_side(role, cache, limits.chunk_tokens)
        if self.disaggregation is not None:
            self.request_table.on_end = self.disaggregation.on_ended
        self._answers = OutputProcessor(
            cache, self.request_table, self.disaggregation, limits.depth
        )
        self.speculation: Speculation | None = None
        if limits.drafts:
            paid, fixed = limits.paid_drafts, limits.fixed_drafts
            whole = limits.block_drafts
            self.speculation = Speculation(limits.drafts, paid, fixed, limits.draft_levels, whole)
        self._planner = RowPlanner(cache, limits, self.speculation)
        self._share = MicroBatches(limits)
        self._ratio = NewTokenRatio(limits.conservativeness, limits.growth)
        self._has_suspects = False
        self._arrivals = 0
        self._now = 0.0

    # -- from the front -----------------------------------------------------------------------

    def submit(self, generate: Generate, now: float) -> None:
        """Queue a request, or answer at once why not."""
        try:
            check_request(generate, self.request_table, self.cache, self.limits, self.adapters)
            if self.adapters is not None:
                generate = self.adapters.received(generate)
            if self.disaggregation is not None:
                generate = self.disaggregation.prepare(generate)
            grammar = self._compile(generate.grammar)
        except RequestError as error:
            if self.disaggregation is not None:
                self.disaggregation.on_refused(generate)
            self.request_table.refuse(generate.request, error.status, str(error), error.code)
            return
        self._arrivals += 1
        priority = self.limits.priorities.of(generate.priority)
        namespace = generate.namespace
        if self.cache.is_apart:
            namespace += self._arrivals.to_bytes(8, "little")
        request = Request(generate, grammar, priority, now, self._arrivals, namespace)
        self._turns.join(request, self.request_table.alive())
        self.request_table.add(request)
        self.store_fetcher.begin(request, now)
        if self.disaggregation is not None:
            self.disaggregation.on_queued(request)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End a request at any state; unknown ids have ended already."""
        request = self.request_table.find(request_id)
        if request is not None:
            self.request_table.finish(request, "abort", now)
        elif self.disaggregation is not None:
            self.disaggregation.cancel(request_id)

    def stop_at(self, request_id: RequestId, length: int, now: float) -> None:
        """The front found a stop text: keep `length` output tokens."""
        request = self.request_table.find(request_id)
        if request is not None:
            keep = max(0, min(length, request.output_len))
            self.request_table.finish(request, "stop", now, cut_at=request.prompt_len + keep)

    def end_copies(self, result: CopyResult) -> None:
        self.store_fetcher.read(len(result.ids), result.seconds)
        self.cache.end_copies(result.ids, result.failed)
        if self.disaggregation is not None:
            self.disaggregation.on_copies_ended()

    def on_kv_transfer(self, news: KVTransferEvent, now: float) -> None:
        """What has become of a room."""
        request = None if self.disaggregation is None else self.disaggregation.on_event(news)
        if request is None:
            return
        if isinstance(news, PrefillResult):
            request.cached_tokens = news.cached_tokens
            self._answers.take(request, array("i", news.tokens), news.scores, now)
        elif isinstance(news, TransferFailed):
            self.request_table.fail(request, news.status, news.text, news.code)

    def flush(self, keeps_pins: bool = False) -> bool:
        """Empty the cache; False (and nothing done) while requests hold pages of it."""
        if not keeps_pins:
            self.cache.pins.let_go()
        if self.request_table.running or any(
            request.flights for request in self.request_table.waiting
        ):
            return False
        self.cache.flush()
        return True

    # -- a step -------------------------------------------------------------------------------

    def schedule(self, step: StepId, now: float) -> StepPlanBuilder:
        """What step `step` should do; a sheet without work is not launched."""
        self._now = now
        limits = self.limits
        end_overdue(self.request_table, limits, now)
        self.request_table.free_lingering()
        self.cache.pins.expire(now)
        builder = StepPlanBuilder(
            *(step, self.request_table.leaves, limits.chunk_tokens, limits.max_prompts),
            *(len(self.request_table.running), limits.draft_room),
        )
        if self.disaggregation is not None:
            request_table = self.request_table
            self.disaggregation.before_step(
                request_table.running, request_table.waiting, len(request_table.free_slots)
            )
        suspect = self._suspect()
        if suspect is not None:
            self._run_alone(suspect, builder)
        else:
            self._preempt()
            builder.steps, builder.report_every = steps_of_a_multi_step(self.request_table, limits)
            self._plan_running(builder)
            self._admit(builder)
        # What goes elsewhere is read first: its page may be another's in this very plan.
        if self.cache.tier is not None:
            self.cache.tier.plan_writes(bool(builder.rows))
            builder.copies[:0] = self.cache.tier.take_copies()
        if self.cache.peers is not None:
            builder.copies[:0] = self.cache.peers.take_copies()
        if builder.has_work:
            self.request_table.leaves = []
            self.flights[step] = builder.flights
            self.counters.steps += 1
            self.counters.computed_tokens += sum(row.count for row in builder.rows)
            if builder.has_decode:
                self._ratio.decay()
        return builder

    def commit(self, result: StepResult, now: float) -> None:
        """Take in the outcome of the oldest step in flight."""
        self._now = now
        flights = self.flights.pop(result.step, [])
        self.store_fetcher.computed(sum(f.tokens for f in flights), result.seconds)
        if result.error:
            self._fail_step(result, flights)
            return
        for failure in result.failed:
            self._fail_row(flights[failure.row], failure)
        self.cache.settle(result.step)
        if self.speculation is not None and (tokens_run := _decoded(flights)):
            self.speculation.learn(tokens_run, flights, result)
        scores: dict[int, list[RowScores]] = {}
        for score in result.scores:
            scores.setdefault(score.row, []).append(score)
        for flight in flights:
            if not flight.is_void:
                drafts = _told(result, flight.row)
                vector = result.vectors[flight.row] if result.vectors else b""
                hidden = result.hidden[flight.row] if result.hidden else b""
                row_scores = scores.get(flight.row, [])
                tokens = result.tokens[flight.row]
                self._accept(flight, tokens, drafts, row_scores, vector, hidden)
        if not len(self.request_table):
            self._ratio.reset()

    @property
    def is_idle(self) -> bool:
        return not len(self.request_table)

    def check(self) -> None:
        """Raise AssertionError when a page, slot or request is counted wrongly."""
        self.request_table.check()
        if self.adapters is not None:
            self.adapters.check()

    # -- planning -----------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Retract the lowest running request when one far above it waits for room in vain.

        One at a time, and none while pages of a retracted one are still coming back.
        """
        gap = self.limits.priorities.preemption_gap
        if not gap or not self.request_table.waiting or not self.request_table.running:
            return
        first, lowest = self.request_table.waiting[0], self.request_table.running[-1]
        if self._waits(first):
            return
        if first.priority - lowest.priority < gap or any(
            r.flights for r in self.request_table.waiting
        ):
            return
        reserved = reserve(self.request_table.running, self.cache, self._ratio)
        match = prefix_of(first, self.cache).whole_blocks
        if not self.request_table.free_slots or not may_enter(
            first, match, self.cache, self.limits, self._ratio, reserved
        ):
            self.request_table.retract(lowest)

    def _plan_running(self, builder: StepPlanBuilder) -> None:
        for request in self._share.of(self.request_table.running, builder):
            if request.state != RUNNING:
                continue  # retracted for a request of higher rank
            if self._planner.plan(request, builder) is Planned.STARVED:
                self._make_way(request, builder)
                if request.state == RUNNING:
                    self._planner.plan(request, builder)  # what was retracted may be free at once
        builder.is_starved = builder.is_starved and bool(self.request_table.running)

    def _make_way(self, starved: Request, builder: StepPlanBuilder) -> None:
        """Retract until the pages that `starved` lacks are at least on their way back.

        What this very step reads and writes stays: with stages, lower ranks may have rows in it
        already. Then `starved` waits, and comes first in the next step.
        """
        wanted, lower = builder.starved_of, victims(self.request_table.running, starved)
        idle = [victim for victim in lower if victim.latest_step != builder.step]
        for victim in idle:
            if self.cache.has_capacity(wanted):
                return
            self.request_table.retract(victim)
        if self.cache.has_capacity(wanted) or len(idle) < len(lower):
            return
        assert starved.lease is not None
        if len(self.request_table.running) > 1 or self.cache.has_copies(starved.lease):
            self.request_table.retract(starved)
        elif self.cache.epochs.is_clear and not self.cache.pins.give_way():
            text = f"needs {wanted} more pages, which the cache does not have"
            self.request_table.fail(starved, 500, text, "out_of_pages")
        self._ratio.retracted(self.request_table.running)

    def _admit(self, builder: StepPlanBuilder) -> None:
        if builder.is_starved or not self.request_table.waiting:
            return
        has_store = self.cache.tier is not None and self.cache.tier.is_attached
        if not self.request_table.free_slots and not has_store:
            return  # in most steps of an overload; putting a long queue in order takes time
        reserved = reserve(self.request_table.running, self.cache, self._ratio)
        self.store_fetcher.go_on(
            self.request_table.waiting,
            lambda request, match: may_enter(
                request, match, self.cache, self.limits, self._ratio, reserved
            ),
        )
        if not self.request_table.free_slots:
            return
        ordered = self._order(self.request_table.waiting, self._probe)
        for request in self._turns.deal(ordered, self._now):
            if request.flights or self._waits(request):
                continue  # for its last token, which was in flight when it was retracted, or pages
            if (
                builder.budget <= 0
                or not self.request_table.free_slots
                or self._share.is_full(builder)
            ):
                return
            while not self._enter(request, builder, reserved):
                if self.request_table.running or not self.cache.pins.give_way():
                    return
            for g, pages in enumerate(reserve([request], self.cache, self._ratio)):
                reserved[g] += pages

    def _waits(self, request: Request) -> bool:
        """Whether it waits for its adapter, for a store, or for another server."""
        if not has_place(request, self.adapters, self.request_table, self._now):
            return True
        if self.disaggregation is not None and self.disaggregation.is_blocked(request):
            return True
        return self.store_fetcher.holds_back(request, self._now)

    def _enter(self, request: Request, builder: StepPlanBuilder, reserved: list[int]) -> bool:
        """Give a slot, a lease and the first row; False (and nothing changed) without room."""
        if not has_place(request, self.adapters, self.request_table, self._now):
            return False
        match = prefix_of(request, self.cache)
        if not may_enter(request, match, self.cache, self.limits, self._ratio, reserved):
            match = match.whole_blocks  # what it would copy may have to go for it
            if not may_enter(request, match, self.cache, self.limits, self._ratio, reserved):
                return False
        if request.admitted_s < 0 and request.incoming is None:
            request.cache_miss, request.missed_eviction = why_no_more(request, self.cache, match)
        slot = self.request_table.free_slots.pop()
        generate = request.generate
        lease, grants = self.cache.lease(slot, request.namespace, match, generate.priority)
        self.request_table.enter(request, slot, lease, match.tokens)
        at_grants = len(builder.grants)
        restores = match.part is not None or (self.cache.has_state and match.tokens > 0)
        if self._planner.plan(request, builder, restores) is not Planned.ROW:
            self.request_table.step_back(request)
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
                embeds=generate.embeds,
                namespace=generate.namespace if self.limits.drafts else b"",
            )
        )
        if request.admitted_s < 0:
            request.admitted_s = self._now
            if request.incoming is None:
                request.cached_tokens = match.tokens
            request.stored_tokens = self.store_fetcher.stored_tokens(request, match)
            self.counters.cached_tokens += match.tokens
            self.counters.stored_tokens += request.stored_tokens
        return True

    def _suspect(self) -> Request | None:
        """The oldest request that was part of a failed step and has not proved itself since."""
        if self._has_suspects:
            for request in self.request_table.waiting + self.request_table.running:
                if request.is_suspect:
                    return request
            self._has_suspects = False
        return None

    def _run_alone(self, suspect: Request, builder: StepPlanBuilder) -> None:
        """After a step failed as a whole, run its requests one at a time to find the culprit."""
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
            elif not self.cache.pins.give_way():
                return

    def _probe(self, request: Request) -> Match:
        return prefix_of(request, self.cache)

    # -- results ------------------------------------------------------------------------------

    def _accept(
        self,
        flight: Flight,
        sampled: bytes,
        drafts: tuple[list[int], list[int]],
        scores: list[RowScores],
        vector: bytes,
        hidden: bytes,
    ) -> None:
        """Append what a row yielded, pass it on, and see whether the request ends."""
        request = flight.request
        assert request.flights[0] is flight
        request.flights.popleft()
        tokens = array("i", sampled)
        if flight.samples:
            if self.speculation is not None and flight.is_decode:
                told = request.next_drafts
                verified = min(flight.samples - 1, len(told))
                self.speculation.saw(request, told, verified, tokens)
            # A retracted one may await a mask.
            request.next_drafts, request.next_parents = drafts
            if request.lease is not None:
                request.planned -= flight.samples - len(tokens)  # rejected drafts
                request.has_sampled = True
        request.is_suspect = request.is_suspect and not flight.samples
        first, request.hidden_to = flight.hidden[0], max(request.hidden_to, flight.hidden[1])
        before = request.output_len
        self._answers.take(request, tokens, scores, self._now, vector, hidden, first)
        self._turns.charge(request, flight.tokens + request.output_len - before)

    # -- failures -----------------------------------------------------------------------------

    def _fail_row(self, flight: Flight, failure: RowFailure) -> None:
        """One row failed: its request alone, and whoever relied on the pages it promised."""
        if not flight.is_void:
            if flight.restores:
                flight.request.starts_over = True
                self.request_table.recompute(flight.request)
            else:
                self.request_table.fail(flight.request, failure.status, failure.text)
        self._drop_promises(flight.step, flight.request.id)

    def _fail_step(self, result: StepResult, flights: list[Flight]) -> None:
        """A step failed as a whole: recompute everything, its requests one at a time."""
        alive = [f.request for f in flights if not f.is_void]
        if len(alive) == 1:
            self.request_table.fail(alive[0], 500, result.error)
        else:
            for request in alive:
                request.is_suspect = self._has_suspects = True
        self._drop_promises(result.step, "")
        self.cache.settle(result.step)
        for request in list(self.request_table.running):
            self.request_table.recompute(request)
        for request in self.request_table.waiting:
            self.request_table.void(request)

    def _drop_promises(self, step: StepId, writer: str) -> None:
        if not self.cache.forget_promises(step, writer):
            return
        for request in list(self.request_table.running):
            assert request.lease is not None
            if not all(node.is_attached for node in request.lease.path):
                self.request_table.recompute(request)
        for request in self.request_table.waiting:
            self.request_table.void(request)  # retracted: which pages it read is no longer known

    # -- the door -----------------------------------------------------------------------------

    def _compile(self, text: str) -> Grammar | None:
        if not text:
            return None
        if self._grammars is None:
            raise RequestError("Constrained output is not available: no grammar backend is loaded")
        return self._grammars(text)


def _told(result: StepResult, row: int) -> tuple[list[int], list[int]]:
    """The drafts of a row, and what they follow where they branch."""
    drafts = array("i", result.drafts[row] if result.drafts else b"")
    return list(drafts), list(array("i", result.parents[row] if result.parents else b""))


def _decoded(flights: list[Flight]) -> int:
    """Tokens of a step in which every row began at its request's newest token; 0 for others."""
    if not all(flight.is_decode and not flight.is_void for flight in flights):
        return 0
    return sum(1 + min(f.samples - 1, len(f.request.next_drafts)) for f in flights)
