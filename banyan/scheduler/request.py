"""Request: the scheduler's state of one generation. Its lease is its only link to pages."""

from collections import Counter, deque
from dataclasses import dataclass, field

from banyan.base.ids import NO_STEP, PADDING_SLOT, SlotId, StepId
from banyan.grammar.base import Grammar
from banyan.kv_cache.cache import TOKEN_BYTES, Lease
from banyan.kv_cache.loads import PrefixLoad
from banyan.messages.requests import Generate

WAITING = "waiting"
"""In the queue; after a retraction possibly with results still in flight."""
RUNNING = "running"
"""Holds a slot and a lease."""
FINISHED = "finished"
"""Its last event has been queued."""


@dataclass
class DraftCounts:
    """Verified drafts, counted over rows that began at the newest token."""

    steps: int = 0
    proposed: int = 0
    correct: int = 0
    by_correct: Counter[int] = field(default_factory=Counter[int])
    """Number of correct drafts -> number of rows."""

    def count(self, proposed: int, correct: int) -> None:
        self.steps += 1
        self.proposed += proposed
        self.correct += correct
        self.by_correct[correct] += 1

    @property
    def histogram(self) -> list[int]:
        """Rows with 0, 1, 2 … correct drafts."""
        return [self.by_correct[i] for i in range(max(self.by_correct, default=-1) + 1)]


@dataclass
class DraftState:
    """Speculative decoding of one request."""

    tokens: list[int] = field(default_factory=list[int])
    """Drafts that follow the newest token; empty until the runner has reported them."""
    parents: list[int] = field(default_factory=list[int])
    """Parent of each draft when they form a tree (base/draft_tree.py)."""
    acceptance: float | None = None
    """Moving average of accepted likeliest drafts; None before the first one."""
    counts: DraftCounts = field(default_factory=DraftCounts)
    proposed: int = 0
    """Drafts that the newest row makes (`Row.propose`)."""
    probes_left: int = 0
    """Rows that still make drafts only to measure whether drafting pays."""


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
    """The row depends on a state copy. If that fails, the request recomputes without it."""
    is_void: bool = False
    """The result will be ignored."""
    propose: int = 0
    """Tokens to draft after the sampled ones."""
    follows_proposal: bool = False
    """The row before it proposed drafts too, so the drafter's cache needs no catching up."""


@dataclass
class StoreFetch:
    """The search for one request's prompt in the store (scheduler/hicache_fetch.py)."""

    namespace: bytes
    """Namespace in the radix tree."""
    tree_keys: list[bytes]
    keys: list[bytes]
    """Store keys of all whole blocks that the request may share."""
    first: int
    """Blocks that were in the device's cache at the start."""
    deadline_s: float
    held: int = -1
    """Blocks, from the start of the prompt, that device and store hold; -1 = no reply yet."""
    loads: list[PrefixLoad] = field(default_factory=list[PrefixLoad])
    """Loads it has waited for, started by it or by others. Only the last may be under way."""
    is_over: bool = False

    @property
    def is_loading(self) -> bool:
        return bool(self.loads) and not self.loads[-1].is_over


@dataclass
class IncomingTransfer:
    """The KV transfer of one request on a decode server (disaggregation/scheduling.py)."""

    blocks: int
    """Blocks of the prompt; once found, those that the prefill server sends."""
    is_found: bool = False
    is_requested: bool = False
    """Pages and result have been requested."""
    load: PrefixLoad | None = None
    has_result: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_result and (self.load is None or self.load.is_over)


@dataclass
class RequestStats:
    """Figures that are reported with the output."""

    submitted_s: float
    admitted_s: float | None = None
    """First admission; None while the request has never run."""
    cached_tokens: int = 0
    stored_tokens: int = 0
    """Cached tokens that came from the store."""
    cache_miss: str = ""
    """Why no more tokens were cached (kv_cache/misses.py)."""
    missed_eviction: int = 0
    """Number of the eviction that removed them; 0 = none."""
    retractions: int = 0


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
        """Requests share pages only within a namespace."""
        self.id = generate.request
        self.sampling = generate.sampling
        self.grammar = grammar
        self.tokens = bytearray(generate.tokens)
        """int32 ids of prompt and output."""
        self.prompt_len = len(generate.tokens) // TOKEN_BYTES
        self.limit = self.prompt_len + generate.sampling.max_new_tokens
        """Known tokens at which the request ends."""
        self.caller, self.weight = generate.caller, generate.weight
        self.priority = priority
        self.rank = (-priority, order)
        """Sort key: higher priority first, then earlier arrival."""
        self.state = WAITING
        self.slot = PADDING_SLOT
        self.lease: Lease | None = None
        self.starts_over = False
        """A row that began on a copied state failed: use no cached prefix again. If a row fails
        once more, the request fails."""
        self.planned = 0
        """Positions that rows cover already; an upper bound while drafts are in flight."""
        self.flights: deque[Flight] = deque()
        self.latest_step = NO_STEP
        """The last step with a row of this request."""
        self.has_sampled = False
        """The runner sampled the newest token itself, so it has drafts for it."""
        self.drafting = DraftState()
        self.jumps_at = 0
        """Sample no further than this many known tokens, then jump forward; 0 = no jump is due."""
        self.has_jumped = False
        """The runner does not have the newest tokens yet: the next row carries them."""
        self.given_after = NO_STEP
        """The next row waits until this step, whose row is void, has completed."""
        self.scored_to = generate.score_from
        """First position whose score has not been reported."""
        self.score_from = generate.score_from
        """`scored_to` at admission: rows request scores from here."""
        self.hidden_to = generate.hidden_from
        """First position whose hidden state has not been reported."""
        self.hidden_from = generate.hidden_from
        """`hidden_to` at admission."""
        self.stats = RequestStats(submitted_s=now)
        self.fetch: StoreFetch | None = None
        self.incoming: IncomingTransfer | None = None
        self.is_suspect = False
        """Took part in a step that failed as a whole; runs alone until a row succeeds."""

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

    def enter(self, slot: SlotId, lease: Lease, cached: int) -> None:
        """WAITING -> RUNNING, with `cached` tokens found in the cache."""
        assert self.state == WAITING and not self.flights
        self.state, self.slot, self.lease = RUNNING, slot, lease
        self.planned = cached
        self.has_sampled, self.has_jumped = False, False
        self.drop_drafts()
        self.drafting.proposed = 0
        self.score_from, self.hidden_from = self.scored_to, self.hidden_to

    def leave(self, state: str) -> SlotId:
        """RUNNING -> WAITING or FINISHED; returns the slot it held. Its lease has been released."""
        assert self.state == RUNNING
        slot = self.slot
        self.state, self.slot, self.lease = state, PADDING_SLOT, None
        self.planned = 0
        return slot

    def drop_drafts(self) -> None:
        """The drafts at hand do not follow the newest token."""
        self.drafting.tokens, self.drafting.parents = [], []
