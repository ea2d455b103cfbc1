"""RequestTable: live requests, their states and their slots. All state changes happen here, so all
resources of a request are released here.
"""

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass

from banyan.base.ids import RequestId, SlotId, StepId
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, Lease
from banyan.kv_cache.page_pool import EpochTracker
from banyan.messages.events import DraftReport, Event, Failed, Finished
from banyan.messages.plan import Mask
from banyan.scheduler.request import FINISHED, RUNNING, WAITING, DraftCounts, Request


@dataclass
class Counters:
    """Totals since the start; they never go down."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stored_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    finished: int = 0
    failed: int = 0


class Slots:
    """Slots 1 … count of running requests; slot 0 is padding.

    Args:
        has_stages: with pipeline stages a slot is reused only after every step that contains it.
            The first stage learns of the release before the last stage has run the old steps.
    """

    def __init__(self, count: int, epochs: EpochTracker, has_stages: bool) -> None:
        self._count = count
        self._epochs = epochs
        self._has_stages = has_stages
        self.free = [SlotId(i) for i in range(count, 0, -1)]
        self.leaves: list[SlotId] = []
        """Released since the last plan. A plan applies leaves before joins, so it may release and
        reuse the same slot."""
        self._lingering: list[tuple[SlotId, StepId]] = []
        """Released, but possibly in steps up to this one."""

    def release(self, slot: SlotId) -> None:
        if self._has_stages and self._epochs.completed < self._epochs.launched:
            self._lingering.append((slot, self._epochs.launched))
            return
        self.free.append(slot)
        self.leaves.append(slot)

    def free_lingering(self) -> None:
        """Free the slots whose steps have completed."""
        completed = self._epochs.completed
        over = [slot for slot, step in self._lingering if step <= completed]
        self._lingering = [(slot, step) for slot, step in self._lingering if step > completed]
        self.free += over
        self.leaves += over

    def check(self, in_use: list[SlotId]) -> None:
        """Raise AssertionError unless every slot is free, lingering or in use, once."""
        lingering = [slot for slot, _ in self._lingering]
        slots = sorted([*self.free, *lingering, *in_use])
        assert slots == list(range(1, self._count + 1)), f"slots in use or free: {slots}"


class RequestTable:
    """Live requests, and the outboxes towards API process (events) and runner (masks)."""

    def __init__(
        self,
        cache: KVCache,
        max_running: int,
        is_drafting: bool = False,
        has_stages: bool = False,
    ) -> None:
        self.is_drafting = is_drafting
        self._cache = cache
        self._requests: dict[RequestId, Request] = {}
        self.waiting: list[Request] = []
        """By rank; includes retracted requests whose last results are still in flight."""
        self.running: list[Request] = []
        """By rank."""
        self.slots = Slots(max_running, cache.epochs, has_stages)
        self.events: list[Event] = []
        self.masks: list[Mask] = []
        self.counters = Counters()
        self.on_end: Callable[[Request], None] = _ignore
        """Called with every request that has ended."""

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    @property
    def alive(self) -> Collection[Request]:
        """All live requests, in the order of arrival."""
        return self._requests.values()

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._requests[request.id] = request
        self.counters.prompt_tokens += request.prompt_len
        insort(self.waiting, request, key=lambda r: r.rank)

    def enter(self, request: Request, slot: SlotId, lease: Lease, cached: int) -> None:
        """WAITING -> RUNNING."""
        request.enter(slot, lease, cached)
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.rank)

    def undo_enter(self, request: Request) -> None:
        """RUNNING -> WAITING before the first row was planned; nothing is in flight."""
        slot = self._release(request, WAITING)
        self.slots.free.append(slot)
        insort(self.waiting, request, key=lambda r: r.rank)

    def retract(self, request: Request) -> None:
        """RUNNING -> WAITING. Tokens that are being sampled are kept when they arrive."""
        request.stats.retractions += 1
        self.counters.retractions += 1
        self.slots.release(self._release(request, WAITING))
        insort(self.waiting, request, key=lambda r: r.rank)

    def retract_all(self) -> None:
        """Retract every running request, the lowest rank first."""
        for request in reversed(self.running[:]):
            self.retract(request)

    def recompute(self, request: Request) -> None:
        """RUNNING or retracted -> WAITING. Results in flight used wrong pages and are ignored."""
        self.void(request)
        if request.state == RUNNING:
            self.retract(request)

    def finish(
        self, request: Request, reason: str, now: float, matched: int = -1, cut_at: int = 0
    ) -> None:
        """Any state -> FINISHED, without error.

        Args:
            matched: token id that ended the request, -1 for none.
            cut_at: number of tokens to keep, prompt included; 0 = all.
        """
        written = request.written
        if cut_at:
            del request.tokens[cut_at * TOKEN_BYTES :]
        if request.lease is not None:
            kept = min(written, request.known)
            self._cache.partial_blocks.keep(request.lease, request.tokens, kept)
        if request.generate.pin_s and reason != "abort":
            path = [] if request.lease is None else request.lease.path
            blocks = path[: request.prompt_len // self._cache.block_size]
            until_s, priority = now + request.generate.pin_s, request.generate.pin_priority
            problem = self._cache.pins.add(request.id, blocks, until_s, priority)
            if problem:
                self.fail(request, 400, f"The prefix {problem}.", "not_pinned")
                return
        self.counters.finished += 1
        self._end(request)
        stats = request.stats
        queued_until = now if stats.admitted_s is None else stats.admitted_s
        self.events.append(
            Finished(
                request=request.id,
                reason=reason,
                prompt_tokens=request.prompt_len,
                output_tokens=request.output_len,
                cached_tokens=stats.cached_tokens,
                matched=matched,
                retractions=stats.retractions,
                queue_s=max(0.0, queued_until - stats.submitted_s),
                stored_tokens=stats.stored_tokens,
                cache_miss=stats.cache_miss,
                drafts=_draft_report(request.drafting.counts) if self.is_drafting else None,
            )
        )

    def fail(self, request: Request, status: int, text: str, code: str = "engine_error") -> None:
        """Any state -> FINISHED with an error; other requests are not affected."""
        self._end(request)
        self.counters.failed += 1
        self.events.append(Failed(request.id, status, text, code))

    def void(self, request: Request) -> None:
        """Ignore all results in flight. Rows that wait for a mask get an empty one (no constraint),
        because the runner must not wait for ever.
        """
        for flight in request.flights:
            flight.is_void = True
            if flight.awaits_mask:
                self.masks.append(Mask(flight.step, flight.row, b""))
        request.flights.clear()

    def check(self) -> None:
        """Raise AssertionError when a page, slot or request is counted wrongly."""
        leases = [r.lease for r in self.running if r.lease is not None]
        assert len(leases) == len(self.running), "a running request without a lease"
        self._cache.check(leases)
        self.slots.check([r.slot for r in self.running])
        assert len(self._requests) == len(self.waiting) + len(self.running)
        for queue in (self.waiting, self.running):
            ranks = [r.rank for r in queue]
            assert ranks == sorted(ranks)

    def _end(self, request: Request) -> None:
        self.void(request)
        if request.state == RUNNING:
            self.slots.release(self._release(request, FINISHED))
        else:
            self.waiting.remove(request)
            request.state = FINISHED
        del self._requests[request.id]
        self.on_end(request)

    def _release(self, request: Request, state: str) -> SlotId:
        assert request.lease is not None
        self._cache.release(request.lease)
        self.running.remove(request)
        return request.leave(state)


def _draft_report(counts: DraftCounts) -> DraftReport:
    return DraftReport(counts.steps, counts.proposed, counts.correct, counts.histogram)


def _ignore(request: Request) -> None:
    pass
