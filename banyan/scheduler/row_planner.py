"""RowPlanner: plans the next row of one running request.

Prefill and decode are the same here: a row runs positions between the request's planned positions
and its known and pending tokens. `choose_steps` decides how many decode steps one plan runs.
"""

from enum import Enum

from banyan.grammar.base import masks_for
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, Lease
from banyan.messages.plan import EXPERTS, HIDDEN, POOL, SAMPLE, SCORE, Mask, Row
from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.request import Flight, Request
from banyan.scheduler.request_table import RequestTable
from banyan.scheduler.spans import SpanContents
from banyan.scheduler.speculation import Speculation
from banyan.scheduler.step_plan_builder import StepPlanBuilder


class Planned(Enum):
    ROW = "row"
    NOTHING = "nothing"
    """The request needs a result in flight first, or the step's budget is used up."""
    STARVED = "starved"
    """The next row lacks pages."""


class RowPlanner:
    """Adds rows to a plan, with their pages, masks and copies."""

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        request_table: RequestTable,
        contents: SpanContents,
        speculation: Speculation | None = None,
    ) -> None:
        self._request_table = request_table
        self._contents = contents
        self._cache = cache
        self._limits = limits
        self._speculation = speculation

    def plan(self, request: Request, builder: StepPlanBuilder, restores: bool = False) -> Planned:
        """Plan the next row of `request`; `restores` if it starts on a copied state or block."""
        lease = request.lease
        assert lease is not None
        is_decode = request.is_decoding
        count, drafts = self._extent(request, builder)
        if not count:
            return Planned.NOTHING
        start, pending = request.planned, request.pending
        end = start + count
        is_bound = self._limits.starts_are_bounds
        self._cache.slide(lease, min(start, request.known) if is_bound else start)
        propose = self._propose(request, builder, end)
        extra = 0  # positions that the drafter writes after the row
        if self._limits.paid_drafts:
            extra = propose + bool(propose and self._limits.block_drafts)
        grants = self._cache.grow(lease, end + extra)
        if grants is None and drafts + extra:  # no request is retracted for drafts
            end, count, drafts = end - drafts, count - drafts, 0
            propose = 0 if extra else propose
            grants = self._cache.grow(lease, end)
        if grants is None:
            builder.is_starved, builder.missing_pages = (
                True,
                lease.missing_pages(self._cache.groups, end),
            )
            return Planned.STARVED
        builder.grants += grants
        samples = self._samples(request, end - drafts, pending, drafts)
        flight = Flight(
            request=request,
            step=builder.step,
            row=len(builder.rows),
            samples=samples,
            tokens=count,
            is_decode=is_decode,
            hidden=(max(start, request.hidden_from), end) if request.wants_hidden else (0, 0),
            restores=restores,
            propose=propose if samples else 0,
            follows_proposal=request.drafting.proposed > 0,
        )
        request.drafting.proposed = flight.propose
        if restores:
            builder.copies += self._cache.partial_blocks.begin(lease, flight.row)
            if self._cache.has_state:
                builder.copies += self._cache.states.restores(lease, flight.row, builder.step)
        if samples and request.grammar is not None:
            self._mask(request, builder, flight, drafts)
        builder.rows.append(self._row(request, start, count, drafts, flight))
        builder.flights.append(flight)
        request.flights.append(flight)
        request.planned, request.has_jumped = end, False
        request.latest_step = builder.step
        if not pending:
            self._publish(request, lease, builder, end, flight.row)
        if is_decode:
            builder.has_decode = True
            builder.draft_budget -= drafts if builder.steps == 1 else 0
        else:
            builder.spend(count)
            if request.generate.spans:
                self._contents.on_row(request, start, end, builder.step)
                self._prepare(request, end, builder)
        return Planned.ROW

    def _extent(self, request: Request, builder: StepPlanBuilder) -> tuple[int, int]:
        """(count, drafts) of the next row; count 0 = no row now.

        Decode rows do not use the step's token budget, so a long prompt never holds up requests
        that are decoding.
        """
        start, known, pending = request.planned, request.known, request.pending
        if request.has_jumped and request.given_after > self._cache.epochs.completed:
            return 0, 0
        if pending and (
            known + pending >= request.limit
            or 0 < request.jumps_at <= known + pending
            or not self._gap_is_over(request, builder)
        ):
            return 0, 0
        assert request.lease is not None
        checkpoint = 0
        if self._cache.has_state and not pending:
            checkpoint = self._cache.states.boundary(request.lease, known, start)
        if request.is_decoding:
            drafts = 0 if checkpoint else self._drafts(request, pending, builder)
            return 1 + drafts, drafts
        if request.generate.spans and self._contents.reach(request, start, known) < known:
            is_whole = self._limits.whole_prompts
            if is_whole or self._contents.reach(request, start, start + 1) == start:
                self._prepare(request, start, builder)
            if is_whole and self._contents.reach(request, start, known) < known:
                return 0, 0
        count = max(0, min(known - start, builder.budget, self._limits.chunk_at(start)))
        if count and request.generate.spans:
            count = self._contents.reach(request, start, start + count) - start
        if self._limits.whole_prompts and count < known - start:
            is_first = builder.budget == self._limits.chunk_tokens
            return (known - start, 0) if is_first else (0, 0)
        return min(count, checkpoint - start) if checkpoint else count, 0

    def _prepare(self, request: Request, start: int, builder: StepPlanBuilder) -> None:
        self._contents.prepare(request, start, builder, self._request_table.running)

    def _drafts(self, request: Request, pending: int, builder: StepPlanBuilder) -> int:
        """Drafts that the next row verifies; in a multi-step plan, its further decode steps."""
        left = (request.jumps_at or request.limit) - request.known - pending
        if builder.steps > 1:
            return max(0, min(builder.steps, left) - 1)
        if self._speculation is None or left <= 1:
            return 0
        if request.wants_hidden:
            return 0  # states of rejected drafts must not be reported
        if request.grammar is not None and self._cache.has_state:
            return 0  # a jump may drop accepted drafts, and a state cannot be rolled back
        wanted = self._speculation.drafts_to_verify(request, builder.running)
        return max(0, min(wanted, left - 1, builder.draft_budget))

    def _propose(self, request: Request, builder: StepPlanBuilder, end: int) -> int:
        """How many tokens to draft after the next row, if it samples."""
        if self._speculation is None:
            return 0
        if not self._limits.paid_drafts:
            return self._speculation.drafts_to_report(request, builder.running)
        # The following row samples one token itself, and none beyond the request's end.
        left = request.limit - 2 - end
        if left <= 0 or request.wants_hidden:
            return 0
        return min(self._speculation.drafts_to_make(request, builder.running), left)

    def _gap_is_over(self, request: Request, builder: StepPlanBuilder) -> bool:
        """Whether the last pipeline stage has sampled the token that the next row needs."""
        return builder.step - request.last_sampled_at > self._limits.token_gap

    def _samples(self, request: Request, end: int, pending: int, drafts: int) -> int:
        """Most tokens that a row can yield; `end` is its end without drafts."""
        reaches_last = pending > 0 or end == request.known
        return drafts + 1 if reaches_last and request.known < request.limit else 0

    def _mask(
        self, request: Request, builder: StepPlanBuilder, flight: Flight, drafts: int
    ) -> None:
        """Add the row's masks; with tokens in flight they follow later (rule R4)."""
        assert request.grammar is not None
        if any(f.samples for f in request.flights):
            flight.awaits_mask = True
            return
        drafting = request.drafting
        bits = masks_for(request.grammar, drafting.tokens[:drafts], drafting.parents)
        builder.masks.append(Mask(builder.step, flight.row, bits))

    def _row(self, request: Request, start: int, count: int, drafts: int, flight: Flight) -> Row:
        want = SAMPLE if flight.samples else 0
        reach = start + count if flight.samples else min(start + count, request.known - 1)
        if request.wants_scores and reach >= request.score_from:
            want |= SCORE
        if request.generate.pool and start + count == request.prompt_len:
            want |= POOL
        if flight.hidden[0] < flight.hidden[1]:
            want |= EXPERTS if request.generate.wants_experts else HIDDEN
        return Row(
            slot=request.slot,
            start=start,
            count=count,
            drafts=drafts,
            given=bytes(request.tokens[start * TOKEN_BYTES :]) if request.has_jumped else b"",
            want=want,
            score_from=max(0, request.score_from),
            masked=bool(flight.samples) and request.grammar is not None,
            hidden_from=flight.hidden[0],
            propose=flight.propose,
        )

    def _publish(
        self, request: Request, lease: Lease, builder: StepPlanBuilder, end: int, row: int
    ) -> None:
        """Share the full blocks of a row of known tokens before the row has run (rule R2)."""
        end = min(end, request.known)
        self._cache.publish(lease, request.tokens, end, builder.step, request.id)
        states = self._cache.states
        if self._cache.has_state and states.boundary(lease, request.known, end - 1) == end:
            builder.copies += states.checkpoint(lease, end, row, builder.step, request.id)


def choose_steps(request_table: RequestTable, limits: SchedulerLimits) -> tuple[int, int]:
    """(steps, report_every) of the next plan: several decode steps while nothing waits.

    The engine sees the sampled tokens at the end of the plan only, so no token may need a decision
    in between, as it would with a grammar.

    Returns:
        steps: decode steps in the plan; 1 = no multi-step decode.
        report_every: steps after which streams get their tokens; 0 = only at the end.
    """
    if limits.multi_step == 1 or request_table.waiting or not request_table.running:
        return 1, 0
    if not all(may_run_multi_step(request) for request in request_table.running):
        return 1, 0
    intervals = (request.generate.stream_interval for request in request_table.running)
    shortest = min((each for each in intervals if each), default=0)
    return limits.multi_step, shortest if shortest < limits.multi_step else 0


def may_run_multi_step(request: Request) -> bool:
    """Whether the request needs nothing between two decode steps."""
    sampling = request.sampling
    is_plain = not (sampling.min_new_tokens or sampling.logit_bias or sampling.processor)
    is_silent = not (request.wants_scores or request.wants_hidden or request.generate.pool)
    is_free = request.grammar is None and not request.has_jumped
    return request.is_decoding and is_plain and is_silent and is_free
