"""Request: one generation as the scheduler sees it. Numbers only; knows no pages but its lease."""

from collections import Counter, deque
from dataclasses import dataclass, field

from banyan.base.ids import NO_STEP, PADDING_SLOT, SlotId, StepId
from banyan.grammar.base import Grammar
from banyan.kv_cache.cache import TOKEN_BYTES, Lease
from banyan.kv_cache.loads import PrefixLoad
from banyan.messages.events import LiveRequest
from banyan.messages.requests import Generate

WAITING = "waiting"
"""In the queue; after a retraction possibly with results still in flight."""
RUNNING = "running"
"""Holds a slot and a lease."""
FINISHED = "finished"
"""Has sent its last event."""


@dataclass
class DraftCounts:
    """What drafts have come to, in rows that began at the newest token."""

    steps: int = 0
    proposed: int = 0
    correct: int = 0
    by_correct: Counter[int] = field(default_factory=Counter[int])
    """Rows by how many of their drafts were right."""

    def count(self, proposed: int, correct: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.correct += correct
        self.by_correct[correct] += 1

    @property
    def histogram(self) -> list[int]:
        """Rows with 0, 1, 2 … right drafts."""
        return [self.by_correct[i] for i in range(max(self.by_correct, default=-1) + 1)]


@dataclass
class Flight:
    """One row in flight."""

    request: "Request"
    step: StepId
    row: int
    samples: int
    """Most tokens the row can yield: 0 without sampling, drafts + 1 after a verify row."""
    tokens: int = 0
    """Positions that the row runs."""
    is_decode: bool = False
    """The row began at the newest token."""
    hidden: tuple[int, int] = (0, 0)
    """First and last + 1 position whose hidden states the row reports."""
    awaits_mask: bool = False
    restores: bool = False
    """A state copy bound to the row may fail; then the request recomputes without it."""
    is_void: bool = False
    """The result will be ignored."""
    ahead: int = 0
    """Tokens to draft behind what the row samples."""
    is_abreast: bool = False
    """So it was with the row before: the drafter has nothing else to read for it."""


@dataclass
class StoreFetch:
    """What one request hopes to find in the store."""

    namespace: bytes
    """In the tree."""
    tree_keys: list[bytes]
    keys: list[bytes]
    """Of every whole unit that the request may share."""
    first: int
    """Units that the device had when the request came."""
    deadline_s: float
    held: int = -1
    """Units, from the first one of the prompt, that device and store have; -1 = not known yet."""
    loads: list[PrefixLoad] = field(default_factory=list[PrefixLoad])
    """PrefixLoads that it has waited for, its own or another's; only the last may be under way."""
    is_over: bool = False

    @property
    def is_loading(self) -> bool:
        return bool(self.loads) and not self.loads[-1].is_over


@dataclass
class IncomingTransfer:
    """What one request is to get from the server that computes its prompt."""

    blocks: int
    """Of the prompt; once the room is found, those whose pages that server has."""
    is_found: bool = False
    is_requested: bool = False
    """For the pages that are wanted, and the rest."""
    load: PrefixLoad | None = None
    has_result: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_result and (self.load is None or self.load.is_over)


class Request:
    """State of one generation between submit and finish.

    Known tokens (prompt and decided output) and planned positions relate like this:

        | planned: K/V written or being written | known, to be planned |          prefill
        | planned, known − 1 written for sure   | pending: sampled, in flight |    decode
    """

    def __init__(
        self,
        generate: Generate,
        grammar: Grammar | None,
        priority: int,
        now: float,
        order: int,
        namespace: bytes | None = None,
    ) -> None:
        assert generate.tokens
        self.generate = generate
        self.namespace = generate.namespace if namespace is None else namespace
        """Only equal ones share pages here."""
        self.id = generate.request
        self.sampling = generate.sampling
        self.grammar = grammar
        self.tokens = bytearray(generate.tokens)
        self.prompt_len = len(generate.tokens) // TOKEN_BYTES
        self.limit = self.prompt_len + generate.sampling.max_new_tokens
        """Known tokens at which the request ends."""
        self.caller, self.weight = generate.caller, generate.weight
        self.priority = priority
        self.rank = (-priority, order)
        """Who goes first: higher priority, then earlier arrival."""
        self.state = WAITING
        self.slot = PADDING_SLOT
        self.lease: Lease | None = None
        self.starts_over = False
        """A row that began on a copied state has failed: no prefix is taken any more, so that a
        row that fails for another reason fails its request."""
        self.planned = 0
        """Positions that rows cover already; an upper bound while drafts are in flight."""
        self.flights: deque[Flight] = deque()
        self.latest_step = NO_STEP
        """The last step that had a row of it."""
        self.has_sampled = False
        """The newest token is the runner's own, which drafted with it when it does so."""
        self.next_drafts: list[int] = []
        """Its drafts, when it has told them."""
        self.next_parents: list[int] = []
        """What each of them follows, where they branch (base/draft_tree.py)."""
        self.draft_share = -1.0
        """Share of its drafts that come true, the last ones above all; -1 = none has been seen."""
        self.drafts = DraftCounts()
        self.ahead = 0
        """Drafts that are made behind the newest row."""
        self.watched = 0
        """Rows for which a draft is made to see whether drafts would be worth their time."""
        self.jumps_at = 0
        """Once so many tokens are known; none is sampled past them before
        (scheduler/jump_forward.py)."""
        self.has_jumped = False
        """The newest tokens are not the runner's own: the next row gives them to it."""
        self.given_after = NO_STEP
        """Not before this step has ended, whose row is void."""
        self.scored_to = generate.score_from
        """First position whose score has not been passed on."""
        self.score_from = generate.score_from
        """`scored_to` at the join: what rows are asked for."""
        self.hidden_to = generate.hidden_from
        """First position whose hidden state has not been passed on."""
        self.hidden_from = generate.hidden_from
        """`hidden_to` at the join."""
        self.submitted_s = now
        self.admitted_s = -1.0
        self.cached_tokens = 0
        self.cache_miss = ""
        """Why there were no more of them (kv_cache/misses.py)."""
        self.missed_eviction = 0
        """Which eviction took them; 0 = none."""
        self.stored_tokens = 0
        """How many of the cached ones came from the store."""
        self.fetch: StoreFetch | None = None
        """What it looks for in the store (scheduler/hicache_fetch.py)."""
        self.incoming: IncomingTransfer | None = None
        """What another server hands over (disaggregation/scheduling.py)."""
        self.retractions = 0
        self.is_suspect = False
        """Was part of a step that failed as a whole; runs alone until it proves itself."""

    @property
    def known(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def output_len(self) -> int:
        return self.known - self.prompt_len

    @property
    def written(self) -> int:
        """Positions, from the first one, that complete steps have written."""
        if self.lease is None or (self.flights and not self.has_sampled):
            return 0
        return min(self.planned, self.known - 1 if self.has_sampled else self.known)

    @property
    def pending(self) -> int:
        """Most tokens that are sampled but not yet known."""
        return sum(flight.samples for flight in self.flights)

    @property
    def is_decoding(self) -> bool:
        """The next row starts at the newest token, which the runner itself has sampled."""
        return self.pending > 0 or (self.has_sampled and self.known - self.planned == 1)

    @property
    def is_all_computed(self) -> bool:
        """Every known token has been through the model."""
        return self.planned >= self.known and not self.flights

    @property
    def wants_scores(self) -> bool:
        return self.generate.score_from >= 0

    @property
    def wants_hidden(self) -> bool:
        return self.generate.hidden_from >= 0

    @property
    def last_sampled_at(self) -> StepId:
        """Step of the newest sampling row in flight."""
        return max((f.step for f in self.flights if f.samples), default=NO_STEP)

    def as_seen(self, now: float) -> LiveRequest:
        """What people see of it."""
        phase = "decode" if self.is_decoding else "prefill"
        admitted_s = self.admitted_s if self.admitted_s >= 0 else now
        return LiveRequest(
            request=self.id,
            phase=phase if self.state == RUNNING else "queue",
            prompt_tokens=self.prompt_len,
            computed_tokens=self.planned,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_len,
            age_s=max(0.0, now - self.submitted_s),
            queue_s=max(0.0, admitted_s - self.submitted_s),
            retractions=self.retractions,
        )

    def enter(self, slot: SlotId, lease: Lease, cached: int) -> None:
        """WAITING -> RUNNING, with `cached` tokens found in the cache."""
        assert self.state == WAITING and not self.flights
        self.state, self.slot, self.lease = RUNNING, slot, lease
        self.planned = cached
        self.has_sampled, self.has_jumped = False, False
        self.next_drafts, self.next_parents = [], []
        self.ahead = 0
        self.score_from, self.hidden_from = self.scored_to, self.hidden_to

    def leave(self, state: str) -> SlotId:
        """RUNNING -> WAITING or FINISHED; returns the slot it held. Its lease has been released."""
        assert self.state == RUNNING
        slot = self.slot
        self.state, self.slot, self.lease = state, PADDING_SLOT, None
        self.planned = 0
        return slot
