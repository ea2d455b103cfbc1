"""RequestTable: which requests are alive, in which state, on which slot. The only place where a
request changes state; whatever it held is let go here.
"""

from bisect import insort
from collections.abc import Callable, Iterable

from banyan.base.ids import RequestId, SlotId, StepId
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, Lease
from banyan.messages.events import DraftReport, Event, Failed, Finished
from banyan.messages.plan import Mask
from banyan.scheduler.counters import Counters
from banyan.scheduler.request import FINISHED, RUNNING, WAITING, DraftCounts, Request


class RequestTable:
    """Live requests, free slots, and the outboxes towards front and runner."""

    def __init__(
        self,
        cache: KVCache,
        max_running: int,
        is_drafting: bool = False,
        has_stages: bool = False,
    ) -> None:
        self.is_drafting = is_drafting
        self._has_stages = has_stages
        self._cache = cache
        self._max_running = max_running
        self._requests: dict[RequestId, Request] = {}
        self.waiting: list[Request] = []
        """By rank; includes retracted requests whose last results are still in flight."""
        self.running: list[Request] = []
        """By rank."""
        self.free_slots = [SlotId(i) for i in range(max_running, 0, -1)]
        self.leaves: list[SlotId] = []
        """Slots that were let go since the last plan. Leaves come before joins, so a slot may be
        left and taken again in one plan."""
        self._lingering: list[tuple[SlotId, StepId]] = []
        """Let go while steps up to this one may be in the line of stages, which read what they know
        of the slot."""
        self.events: list[Event] = []
        self.masks: list[Mask] = []
        self.counters = Counters()
        self.on_end: Callable[[Request], None] = _nobody
        """Told of every request that has ended."""

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def alive(self) -> Iterable[Request]:
        return self._requests.values()

    def ids(self) -> list[RequestId]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._requests[request.id] = request
        self.counters.prompt_tokens += request.prompt_len
        insort(self.waiting, request, key=lambda r: r.rank)

    def enter(self, request: Request, slot: SlotId, lease: Lease, cached: int) -> None:
        """WAITING -> RUNNING."""
        request.enter(slot, lease, cached)
        self.waiting.remove(request)
        insort(self.running, request, key=lambda r: r.rank)

    def step_back(self, request: Request) -> None:
        """RUNNING -> WAITING before its first row was planned: nothing of it is in flight."""
        slot = self._let_go(request, WAITING)
        self.free_slots.append(slot)
        insort(self.waiting, request, key=lambda r: r.rank)

    def retract(self, request: Request) -> None:
        """RUNNING -> WAITING; what was sampled in flight is kept when it arrives."""
        request.retractions += 1
        self.counters.retractions += 1
        self._give_slot(self._let_go(request, WAITING))
        insort(self.waiting, request, key=lambda r: r.rank)

    def retract_all(self) -> None:
        """Every running request gives its pages back, the lowest first."""
        for request in reversed(self.running[:]):
            self.retract(request)

    def recompute(self, request: Request) -> None:
        """RUNNING or retracted -> WAITING; what is in flight rests on wrong pages and is void."""
        self.void(request)
        if request.state == RUNNING:
            self.retract(request)

    def finish(
        self, request: Request, reason: str, now: float, matched: int = -1, cut_at: int = 0
    ) -> None:
        """Any state -> FINISHED, in order; `cut_at` when its tokens from there on do not count."""
        written = request.written
        if cut_at:
            del request.tokens[cut_at * TOKEN_BYTES :]
        if request.lease is not None:
            self._cache.parts.keep(request.lease, request.tokens, min(written, request.known))
        if request.generate.pin_s and reason != "abort":
            path = [] if request.lease is None else request.lease.path
            whole = path[: request.prompt_len // self._cache.block_size]
            until_s, priority = now + request.generate.pin_s, request.generate.pin_priority
            problem = self._cache.pins.add(request.id, whole, until_s, priority)
            if problem:
                self.fail(request, 400, f"The prefix {problem}.", "not_pinned")
                return
        self.counters.finished += 1
        self._end(request)
        queued_until = request.admitted_s if request.admitted_s >= 0 else now
        self.events.append(
            Finished(
                request=request.id,
                reason=reason,
                prompt_tokens=request.prompt_len,
                output_tokens=request.output_len,
                cached_tokens=request.cached_tokens,
                matched=matched,
                retractions=request.retractions,
                queue_s=max(0.0, queued_until - request.submitted_s),
                stored_tokens=request.stored_tokens,
                cache_miss=request.cache_miss,
                drafts=_report(request.drafts) if self.is_drafting else None,
            )
        )

    def fail(self, request: Request, status: int, text: str, code: str = "engine_error") -> None:
        """Any state -> FINISHED; only this request is affected."""
        self._end(request)
        self.refuse(request.id, status, text, code)

    def refuse(self, request_id: RequestId, status: int, text: str, code: str) -> None:
        self.counters.failed += 1
        self.events.append(Failed(request_id, status, text, code))

    def void(self, request: Request) -> None:
        """Ignore what is in flight; rows that wait for a mask get an empty one (no constraint)."""
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
        lingering = [slot for slot, _ in self._lingering]
        slots = sorted([*self.free_slots, *lingering, *(r.slot for r in self.running)])
        assert slots == list(range(1, self._max_running + 1)), f"slots in use or free: {slots}"
        assert len(self._requests) == len(self.waiting) + len(self.running)
        for queue in (self.waiting, self.running):
            ranks = [r.rank for r in queue]
            assert ranks == sorted(ranks)

    def _end(self, request: Request) -> None:
        self.void(request)
        if request.state == RUNNING:
            self._give_slot(self._let_go(request, FINISHED))
        else:
            self.waiting.remove(request)
            request.state = FINISHED
        del self._requests[request.id]
        self.on_end(request)

    def _let_go(self, request: Request, state: str) -> SlotId:
        assert request.lease is not None
        self._cache.release(request.lease)
        self.running.remove(request)
        return request.leave(state)

    def _give_slot(self, slot: SlotId) -> None:
        epochs = self._cache.epochs
        if self._has_stages and epochs.completed < epochs.launched:
            self._lingering.append((slot, epochs.launched))
            return
        self.free_slots.append(slot)
        self.leaves.append(slot)

    def free_lingering(self) -> None:
        """With stages: let slots be left and taken again of which nothing is in flight. The first
        stage hears of it before the last one has run what was."""
        completed = self._cache.epochs.completed
        over = [slot for slot, step in self._lingering if step <= completed]
        self._lingering = [(slot, step) for slot, step in self._lingering if step > completed]
        self.free_slots += over
        self.leaves += over


def _report(drafts: DraftCounts) -> DraftReport:
    return DraftReport(drafts.steps, drafts.proposed, drafts.correct, drafts.histogram)


def _nobody(request: Request) -> None:
    """Nobody is told."""
