"""StoreFetcher: which waiting requests load the rest of their prompt from the store.

A request that waits for the store never holds up another. A prefix is read only if that is expected
to take less time than computing it. Both speeds come from results, so a replay decides alike.

    lookup ──Held──► found ──pages──► loading ──CopyResult──► over: admitted like any other
      └── not in the store, too slow, or deadline passed ──► over
"""

import math
from collections.abc import Callable

from banyan.kv_cache.cache import KVCache, Match, block_keys
from banyan.kv_cache.hierarchical_cache import StoreRules, StoreTier, store_keys
from banyan.messages.control_ops import AttachStore
from banyan.messages.plan import Held, Lookup
from banyan.scheduler.admission import cached_prefix, prefix_limit
from banyan.scheduler.request import Request, StoreFetch

BEST_EFFORT = "best_effort"
"""A request uses what has arrived when it is admitted, and never waits."""
WAIT_COMPLETE = "wait_complete"
"""A request waits until everything has arrived."""
TIMEOUT = "timeout"
"""A request waits until everything has arrived, up to a deadline that grows with its length."""

_LOOK_AHEAD = 16
"""Number of waiting requests, from the first, for which pages are loaded."""
_FEW_TOKENS = 32
"""Smaller steps do not measure the time per token."""
_FORGET = 0.9
"""Factor on the measured read time each time reading seems too slow, so that it is tried again."""


class Speed:
    """Moving average of seconds per piece of work; 0 = not measured yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float, pieces: int) -> None:
        each = seconds / pieces
        self.seconds = (self.seconds + each) / 2 if self.seconds else each


class StoreFetcher:
    """
    Args:
        cache: without a store tier nothing is looked up.
    """

    def __init__(self, cache: KVCache) -> None:
        self.lookups: list[Lookup] = []
        """Outbox towards the mover."""
        self._cache = cache
        self._tier = cache.tier
        self._open: dict[int, StoreFetch] = {}
        self._last_id = 0
        self._reading, self._computing = Speed(), Speed()
        """Time per block, and per token."""

    # -- attaching a store --------------------------------------------------------------------

    def attach(self, op: AttachStore) -> None:
        """A store was attached; its speed is not known yet."""
        assert self._tier is not None
        rules = StoreRules(
            write=op.write,
            prefetch=op.prefetch,
            threshold=op.threshold,
            timeout_s=op.timeout_s,
            timeout_per_ki_s=op.timeout_per_ki_s,
            max_writes=self._tier.rules.max_writes,
        )
        self._tier.attach(rules)
        self._reading = Speed()

    def detach(self) -> None:
        """The store was detached; no request waits for it any more."""
        assert self._tier is not None
        self._tier.detach()
        self._open.clear()
        self.lookups.clear()

    # -- events -------------------------------------------------------------------------------

    def look_up(self, request: Request, now: float) -> None:
        """Ask the store for the blocks of a new request that the device lacks."""
        tier, weights = self._tier, self._cache.weights
        if tier is None or not tier.is_attached or weights != tier.weights:
            return
        block_size, rules = self._cache.block_size, tier.rules
        limit = prefix_limit(request) // block_size * block_size
        depth = len(cached_prefix(request, self._cache).path)
        wanted = limit - depth * block_size
        if wanted < max(block_size, rules.threshold):
            return
        tree_keys = list(block_keys(request.tokens, block_size, 0, limit // block_size))
        namespace = weights + request.namespace
        keys = store_keys(namespace, tree_keys)
        patience_s = {
            BEST_EFFORT: 0.0,
            WAIT_COMPLETE: math.inf,
            TIMEOUT: rules.timeout_s + rules.timeout_per_ki_s * wanted / 1024,
        }[rules.prefetch]
        request.fetch = StoreFetch(namespace, tree_keys, keys, depth, now + patience_s)
        self._last_id += 1
        self._open[self._last_id] = request.fetch
        self.lookups.append(Lookup(self._last_id, keys[depth:]))

    def take_lookups(self) -> list[Lookup]:
        """Drain the outbox."""
        taken, self.lookups = self.lookups, []
        return taken

    def on_lookup_reply(self, held: Held) -> None:
        fetch = self._open.pop(held.id, None)
        if fetch is not None:
            fetch.held = fetch.first + held.count
            fetch.is_over = not held.count

    def note_read(self, pages: int, seconds: float) -> None:
        """`pages` pages were read from the store."""
        if pages and seconds > 0:
            self._reading.add(seconds * len(self._cache.groups), pages)

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens has run."""
        if tokens >= _FEW_TOKENS and seconds > 0:
            self._computing.add(seconds, tokens)

    # -- loads --------------------------------------------------------------------------------

    def start_loads(self, waiting: list[Request], fits: Callable[[Request, Match], bool]) -> None:
        """Start loads for the first waiting requests, while pages are free.

        Args:
            fits: whether a request with this match could be admitted.
        """
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
                self._next_load(self._tier, request, fetch, fits)

    def is_blocked(self, request: Request, now: float) -> bool:
        """Whether the request still waits for the store."""
        fetch = request.fetch
        if fetch is None or fetch.is_over:
            return False
        is_there = self._tier is not None and self._tier.is_attached
        fetch.is_over = not is_there or now >= fetch.deadline_s
        return not fetch.is_over

    def stored_tokens(self, request: Request, match: Match) -> int:
        """Tokens of a match that came from the store while the request waited."""
        fetch = request.fetch
        if fetch is None:
            return 0
        ends = [
            (load.first, min(load.first + load.arrived, len(match.path))) for load in fetch.loads
        ]
        return sum(max(0, end - first) for first, end in ends) * self._cache.block_size

    def _next_load(
        self,
        tier: StoreTier,
        request: Request,
        fetch: StoreFetch,
        fits: Callable[[Request, Match], bool],
    ) -> None:
        # Blocks that end in a span are loaded once too, though the request may not stop there.
        match = cached_prefix(request, self._cache).whole_blocks
        depth = len(match.path)
        is_broken = bool(fetch.loads) and fetch.loads[-1].is_broken
        is_other = self._cache.weights != tier.weights  # weights were updated while it waited
        if is_broken or is_other or depth >= fetch.held:
            fetch.is_over = True
            return
        other = tier.loading.get(fetch.keys[depth])
        if other is not None:
            fetch.loads.append(other)
            return
        if not self._is_worth(fetch.held - depth, len(tier.loading)):
            fetch.is_over = True
            return
        end = depth
        most = min(fetch.held, depth + tier.load_capacity())
        while end < most and fetch.keys[end] not in tier.loading:
            end += 1
        if end == depth or not fits(request, match):
            return
        new = slice(depth, end)
        load = tier.load(fetch.namespace, match.path, fetch.tree_keys[new], fetch.keys[new])
        if load is not None:
            fetch.loads.append(load)
        elif self._cache.epochs.is_clear:
            fetch.is_over = True  # and no page will become free

    def _is_worth(self, blocks: int, before: int) -> bool:
        """Whether reading `blocks` blocks after `before` others is faster than computing them."""
        reading_s = self._reading.seconds * (blocks + before)
        computing_s = self._computing.seconds * blocks * self._cache.block_size
        if not computing_s or reading_s <= computing_s:
            return True
        self._reading.seconds *= _FORGET
        return False
