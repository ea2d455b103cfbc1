"""RowPlanner: the next row of one running request. There is no prefill and no decode here, only
how far a request's planned positions are behind its known and pending tokens.
"""

from enum import Enum

from banyan.grammar.base import masks_for
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, Lease
from banyan.messages.plan import EXPERTS, HIDDEN, POOL, SAMPLE, SCORE, Mask, Row
from banyan.scheduler.budget import Limits
from banyan.scheduler.request import Flight, Request
from banyan.scheduler.speculation import Speculation
from banyan.scheduler.step_plan_builder import StepPlanBuilder


class Planned(Enum):
    ROW = "row"
    NOTHING = "nothing"
    """The request waits for something in flight, or the step's budget is used up."""
    STARVED = "starved"
    """Its next row lacks pages."""


class RowPlanner:
    """Adds rows to a plan, with their pages, masks and copies."""

    def __init__(
        self, cache: KVCache, limits: Limits, speculation: Speculation | None = None
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._speculation = speculation

    def plan(self, request: Request, builder: StepPlanBuilder, restores: bool = False) -> Planned:
        """Plan the next row of `request`; `restores` when it starts on a matched state."""
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
        ahead = self._ahead(request, builder, end)
        room = ahead + bool(ahead and self._limits.block_drafts) if self._limits.paid_drafts else 0
        grants = self._cache.grow(lease, end + room)
        if grants is None and drafts + room:  # they are no reason to retract anybody
            end, count, drafts = end - drafts, count - drafts, 0
            ahead = 0 if room else ahead
            grants = self._cache.grow(lease, end)
        if grants is None:
            builder.is_starved, builder.starved_of = True, self._cache.missing(lease, end)
            return Planned.STARVED
        builder.grants += grants
        row = len(builder.rows)
        samples = self._samples(request, end - drafts, pending, drafts)
        hidden = (max(start, request.hidden_from), end) if request.wants_hidden else (0, 0)
        flight = Flight(
            request, builder.step, row, samples, count, is_decode, hidden, restores=restores
        )
        self._note_drafting(flight, ahead if samples else 0)
        if restores:
            builder.copies += self._cache.restores(lease, row, builder.step)
        if samples and request.grammar is not None:
            self._mask(request, builder, flight, drafts)
        builder.rows.append(self._row(request, start, count, drafts, flight))
        builder.flights.append(flight)
        request.flights.append(flight)
        request.planned, request.has_jumped = end, False
        request.latest_step = builder.step
        if not pending:
            self._share(request, lease, builder, end, row)
        if is_decode:
            builder.has_decode = True
            builder.draft_room -= drafts if builder.steps == 1 else 0
        else:
            builder.spend(count)
        return Planned.ROW

    def _extent(self, request: Request, builder: StepPlanBuilder) -> tuple[int, int]:
        """(count, drafts) of the next row; count 0 = no row now.

        Decode rows are not counted against the step's budget, so a long prompt never holds up
        those who are past theirs.
        """
        start, known, pending = request.planned, request.known, request.pending
        if request.has_jumped and request.given_after > self._cache.horizon.completed:
            return 0, 0
        if pending and (
            known + pending >= request.limit
            or 0 < request.jumps_at <= known + pending
            or not self._gap_is_over(request, builder)
        ):
            return 0, 0
        assert request.lease is not None
        border = 0 if pending else self._cache.checkpoint_at(request.lease, known, start)
        if request.is_decoding:
            drafts = 0 if border else self._drafts(request, pending, builder)
            return 1 + drafts, drafts
        count = max(0, min(known - start, builder.budget))
        if self._limits.whole_prompts and count < known - start:
            is_first = builder.budget == self._limits.chunk_tokens
            return (known - start, 0) if is_first else (0, 0)
        return min(count, border - start) if border else count, 0

    def _drafts(self, request: Request, pending: int, builder: StepPlanBuilder) -> int:
        left = (request.jumps_at or request.limit) - request.known - pending
        if builder.steps > 1:
            return max(0, min(builder.steps, left) - 1)
        if self._speculation is None or left <= 1:
            return 0
        if request.wants_hidden:
            return 0  # they are told of positions that stand
        if request.grammar is not None and self._cache.has_state:
            return 0  # a jump may come before drafts that stand, and a state does not go back
        wanted = self._speculation.to_verify(request, builder.running)
        return max(0, min(wanted, left - 1, builder.draft_room))

    def _ahead(self, request: Request, builder: StepPlanBuilder, end: int) -> int:
        """How many tokens to draft behind what the next row samples, if it does."""
        if self._speculation is None:
            return 0
        if not self._limits.paid_drafts:
            return self._speculation.to_tell(request, builder.running)
        # The row after it has a token of its own to give, and none beyond the end.
        left = request.limit - 2 - end
        if left <= 0 or request.wants_hidden:
            return 0
        return min(self._speculation.to_make(request, builder.running), left)

    def _note_drafting(self, flight: Flight, ahead: int) -> None:
        request = flight.request
        flight.ahead, flight.is_abreast = ahead, request.ahead > 0
        request.ahead = ahead

    def _gap_is_over(self, request: Request, builder: StepPlanBuilder) -> bool:
        return builder.step - request.last_sampled_at > self._limits.token_gap

    def _samples(self, request: Request, end: int, pending: int, drafts: int) -> int:
        """Most tokens that a row ending at `end` (drafts left out) can yield."""
        reaches_last = pending > 0 or end == request.known
        return drafts + 1 if reaches_last and request.known < request.limit else 0

    def _mask(
        self, request: Request, builder: StepPlanBuilder, flight: Flight, drafts: int
    ) -> None:
        assert request.grammar is not None
        if any(f.samples for f in request.flights):
            flight.awaits_mask = True
            return
        bits = masks_for(request.grammar, request.next_drafts[:drafts], request.next_parents)
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
            propose=flight.ahead,
        )

    def _share(
        self, request: Request, lease: Lease, builder: StepPlanBuilder, end: int, row: int
    ) -> None:
        """Promise the full units of a row of known tokens to whoever comes next (rule R2)."""
        end = min(end, request.known)
        self._cache.publish(lease, request.tokens, end, builder.step, request.id)
        if self._cache.checkpoint_at(lease, request.known, end - 1) == end:
            builder.copies += self._cache.checkpoints(lease, end, row, builder.step, request.id)
