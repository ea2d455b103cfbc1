"""StoreFetcher: which waiting requests load the rest of their prompt from the store.

A request that waits for the store never holds up another. What it finds is read only where that is
expected to take less time than computing it; both speeds come with results, so a replay decides
alike.

    asked ──Held──► found ──pages──► loading ──CopyResult──► over: enters like any other
      └── nothing there, too slow, or patience at its end ──► over
"""

import math
from collections.abc import Callable

from banyan.kv_cache.cache import KVCache, Match, block_keys
from banyan.kv_cache.hierarchical_cache import StoreRules, StoreTier
from banyan.messages.control_ops import AttachStore
from banyan.messages.plan import Held, Lookup
from banyan.scheduler.admission import prefix_limit, prefix_of
from banyan.scheduler.request import Request, StoreFetch

BEST_EFFORT = "best_effort"
"""A request takes what has come when there is room for it, and never waits."""
WAIT_COMPLETE = "wait_complete"
"""A request waits until everything has come."""
TIMEOUT = "timeout"
"""A request waits until everything has come, but not for ever: longer ones longer."""

_LOOK_AHEAD = 16
"""Waiting requests, from the first on, for which pages are loaded."""
_FEW_TOKENS = 32
"""Steps of fewer tokens say little of how long a token takes."""
_FORGET = 0.9
"""Each time that reading seems too slow, it is believed to be so much faster: it is tried again."""


class Speed:
    """Seconds per piece of work, as lately measured; 0 = not known yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, seconds: float, pieces: int) -> None:
        each = seconds / pieces
        self.seconds = (self.seconds + each) / 2 if self.seconds else each


class StoreFetcher:
    """
    Args:
        cache: without a tier nothing is looked for.
    """

    def __init__(self, cache: KVCache) -> None:
        self.lookups: list[Lookup] = []
        """Outbox towards the mover."""
        self._cache = cache
        self._tier = cache.tier
        self._asked: dict[int, StoreFetch] = {}
        self._last_id = 0
        self._reading, self._computing = Speed(), Speed()
        """Per unit, and per token."""

    # -- which store --------------------------------------------------------------------------

    def attach(self, order: AttachStore) -> None:
        """There is another store, whose speed nobody knows."""
        assert self._tier is not None
        rules = StoreRules(
            write=order.write,
            prefetch=order.prefetch,
            threshold=order.threshold,
            timeout_s=order.timeout_s,
            timeout_per_ki_s=order.timeout_per_ki_s,
            max_writes=self._tier.rules.max_writes,
        )
        self._tier.attach(rules)
        self._reading = Speed()

    def detach(self) -> None:
        """There is no store any more: nobody waits for it."""
        assert self._tier is not None
        self._tier.detach()
        self._asked.clear()
        self.lookups.clear()

    # -- what comes in ------------------------------------------------------------------------

    def begin(self, request: Request, now: float) -> None:
        """A request has come: ask for what the device does not have of it."""
        tier, weights = self._tier, self._cache.weights
        if tier is None or not tier.is_attached or weights != tier.weights:
            return
        block_size, rules = self._cache.block_size, tier.rules
        limit = prefix_limit(request) // block_size * block_size
        depth = len(prefix_of(request, self._cache).path)
        wanted = limit - depth * block_size
        if wanted < max(block_size, rules.threshold):
            return
        tree_keys = list(block_keys(request.tokens, block_size, 0, limit // block_size))
        namespace = weights + request.namespace
        keys = tier.keys(namespace, tree_keys)
        patience_s = {
            BEST_EFFORT: 0.0,
            WAIT_COMPLETE: math.inf,
            TIMEOUT: rules.timeout_s + rules.timeout_per_ki_s * wanted / 1024,
        }[rules.prefetch]
        request.fetch = StoreFetch(namespace, tree_keys, keys, depth, now + patience_s)
        self._last_id += 1
        self._asked[self._last_id] = request.fetch
        self.lookups.append(Lookup(self._last_id, keys[depth:]))

    def answer(self, held: Held) -> None:
        """The store has told what it has."""
        fetch = self._asked.pop(held.id, None)
        if fetch is not None:
            fetch.held = fetch.first + held.count
            fetch.is_over = not held.count

    def read(self, pages: int, seconds: float) -> None:
        """So many pages were read from the store."""
        if pages and seconds > 0:
            self._reading.measured(seconds * len(self._cache.groups), pages)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has run."""
        if tokens >= _FEW_TOKENS and seconds > 0:
            self._computing.measured(seconds, tokens)

    # -- what is done about it ----------------------------------------------------------------

    def go_on(self, waiting: list[Request], may_enter: Callable[[Request, Match], bool]) -> None:
        """Begin to load for those that are next, as far as there is room."""
        if self._tier is None or not self._tier.is_attached:
            return
        seen = 0
        for request in waiting:
            fetch = request.fetch
            if fetch is None or fetch.is_over or fetch.held < 0:
                continue
            seen += 1
            if seen > _LOOK_AHEAD:
                return
            if not fetch.is_loading:
                self._next_load(self._tier, request, fetch, may_enter)

    def holds_back(self, request: Request, now: float) -> bool:
        """Whether the request still waits for the store."""
        fetch = request.fetch
        if fetch is None or fetch.is_over:
            return False
        is_there = self._tier is not None and self._tier.is_attached
        fetch.is_over = not is_there or now >= fetch.deadline_s
        return not fetch.is_over

    def stored_tokens(self, request: Request, match: Match) -> int:
        """How much of a match has come from the store while the request waited."""
        fetch = request.fetch
        if fetch is None:
            return 0
        ends = [(load.first, min(load.first + load.came, len(match.path))) for load in fetch.loads]
        return sum(max(0, end - first) for first, end in ends) * self._cache.block_size

    def _next_load(
        self,
        tier: StoreTier,
        request: Request,
        fetch: StoreFetch,
        may_enter: Callable[[Request, Match], bool],
    ) -> None:
        match = prefix_of(request, self._cache).whole_blocks
        depth = len(match.path)
        is_broken = bool(fetch.loads) and fetch.loads[-1].is_broken
        is_other = self._cache.weights != tier.weights  # they were taken while it waited
        if is_broken or is_other or depth >= fetch.held:
            fetch.is_over = True
            return
        other = tier.load_of(fetch.keys[depth])
        if other is not None:
            fetch.loads.append(other)
            return
        if not self._is_worth(fetch.held - depth, tier.loading):
            fetch.is_over = True
            return
        end = depth
        most = min(fetch.held, depth + tier.room())
        while end < most and tier.load_of(fetch.keys[end]) is None:
            end += 1
        if end == depth or not may_enter(request, match):
            return
        new = slice(depth, end)
        load = tier.load(fetch.namespace, match.path, fetch.tree_keys[new], fetch.keys[new])
        if load is not None:
            fetch.loads.append(load)
        elif self._cache.epochs.is_clear:
            fetch.is_over = True  # no page is on its way back

    def _is_worth(self, blocks: int, before: int) -> bool:
        """Whether reading them, after others under way, is expected to take less than computing."""
        reading_s = self._reading.seconds * (blocks + before)
        computing_s = self._computing.seconds * blocks * self._cache.block_size
        if not computing_s or reading_s <= computing_s:
            return True
        self._reading.seconds *= _FORGET
        return False
