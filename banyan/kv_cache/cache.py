"""KVCache: the pages of one replica. One radix tree, one page pool per cache group.

A running request holds a Lease. Its private pages move to the tree when they are full (`publish`).
If the tree already holds the same block from another writer, the lease locks that node too and
keeps its own pages private.

The cache works on page ids and counts. `runner/kvstore.py` holds the tensors.
"""

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from banyan.base.ids import NO_STEP, PADDING_PAGE, SlotId, StepId
from banyan.disaggregation.peer_pages import PeerTier
from banyan.kv_cache.cache_events import CacheEvents
from banyan.kv_cache.eviction import EvictionKey
from banyan.kv_cache.hierarchical_cache import StoreRules, StoreTier
from banyan.kv_cache.loads import PrefixLoads
from banyan.kv_cache.misses import Misses
from banyan.kv_cache.page_pool import EpochTracker, PagePool
from banyan.kv_cache.partial_blocks import PartialBlocks
from banyan.kv_cache.pins import Pins
from banyan.kv_cache.radix_tree import CachedPages, Lease, Match, Node, RadixTree
from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup, common_block_size
from banyan.kv_cache.state_checkpoints import StateCheckpoints
from banyan.messages.plan import PageGrant

TOKEN_BYTES = 4
WEIGHTS_BYTES = 8
"""Length of the id of a version of the weights."""


class Ledger(msgspec.Struct, frozen=True):
    """Where the pages of one group are: free + cached + held + in_flight == total."""

    total: int
    free: int
    cached: int
    held: int
    in_flight: int

    @property
    def leaked(self) -> int:
        return self.total - self.free - self.cached - self.held - self.in_flight


class Capacity:
    """Whether pages are free or can be made free."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        block_size: int,
        pools: list[PagePool],
        cached: CachedPages,
    ) -> None:
        self._groups = groups
        self._block_size = block_size
        self._pools = pools
        self._cached = cached

    def has(self, pages: list[int]) -> bool:
        """Whether these pages per group are free, evictable, or on their way back."""
        return all(count <= self._in_reach(g) for g, count in enumerate(pages))

    def admits(self, match: Match, tokens: int, chunk: int, reserve: list[int]) -> bool:
        """Whether a request of `tokens` positions with this match fits next to `reserve` pages.

        Args:
            chunk: longest row. A WINDOW group never holds more than window + chunk positions.
        """
        for g, group in enumerate(self._groups):
            want = group.peak_pages(tokens, chunk)
            needed = match.path[group.first_needed(self._block_size, len(match.path)) :]
            shared = sum(len(node.pages[g]) for node in needed) if group.kind != STATE else 0
            read = [*needed, *([match.partial.node] if match.partial else [])]
            idle = sum(len(node.pages[g]) for node in read if not node.locks[g])
            if max(0, want - shared) + reserve[g] > self._in_reach(g) - idle:
                return False
        return True

    def fits_alone(self, tokens: int, chunk: int) -> bool:
        """Whether a request of `tokens` positions could run with the whole cache to itself."""
        return all(
            group.peak_pages(tokens, chunk) <= pool.total
            for group, pool in zip(self._groups, self._pools, strict=True)
        )

    def make_free(self, wanted: list[int]) -> bool:
        """Evict until `wanted` pages per group are free; False if some must be waited for.

        Pages on their way back count: evicting others instead would be a waste.
        """
        for g, count in enumerate(wanted):
            shortage = count - self._pools[g].free - self._pools[g].limbo
            if shortage > 0:
                self._cached.evict(g, shortage)
        return all(count <= self._pools[g].free for g, count in enumerate(wanted))

    def _in_reach(self, g: int) -> int:
        return self._pools[g].free + self._pools[g].limbo + self._cached.evictable[g]


class KVCache:
    """Pools, tree and leases of one replica.

    Args:
        groups: cache groups in plan order.
        eviction_key: sort key of unlocked nodes; the smallest is evicted first.
        share: False = no request uses pages of another one (nothing is published or matched). With
            `has_peers` the tree is used all the same, because transfers need it, but each request
            gets a namespace of its own.
        store: rules of the store tier; None without a store.
        records_events: collect added and removed blocks in `events`.
        has_peers: pages are sent to or received from other servers.
        has_partial_blocks: a prefix may end within a block.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        eviction_key: EvictionKey,
        share: bool = True,
        store: StoreRules | None = None,
        records_events: bool = False,
        has_peers: bool = False,
        has_partial_blocks: bool = True,
    ) -> None:
        self.groups = groups
        self.block_size = common_block_size(groups)
        """Tokens per block, the unit of the radix tree."""
        self.epochs = EpochTracker()
        self.weights = bytes(WEIGHTS_BYTES)
        """Id of the current weights. It precedes every namespace: pages computed with different
        weights are never shared."""
        self.isolates_requests = has_peers and not share
        """Each request needs a namespace of its own."""
        self._share = share or has_peers
        self.pools = [PagePool(group.num_pages, self.epochs) for group in groups]
        self.events = CacheEvents() if records_events and share else None
        self.tree = RadixTree(len(groups), self._on_removed, self.block_size)
        self.cached = CachedPages(
            self.tree,
            groups,
            eviction_key,
            give_back=lambda g, pages, epoch: self.pools[g].release(pages, epoch),
            on_evict=self._on_evict,
        )
        self.capacity = Capacity(groups, self.block_size, self.pools, self.cached)
        num_pages = max(pool.total for pool in self.pools)
        self.misses = Misses(self.tree, self.block_size, share, num_pages)
        self._loads = PrefixLoads(self.pools, self.cached, self.epochs, self.capacity.make_free)
        self.tier: StoreTier | None = None
        if store is not None and share:
            self.tier = StoreTier(
                pools=self.pools,
                epochs=self.epochs,
                loads=self._loads,
                rules=store,
                weights=self.weights,
                on_stored=self._on_stored,
            )
        self.peers: PeerTier | None = None
        if has_peers:
            self.peers = PeerTier(
                groups=groups,
                block_size=self.block_size,
                epochs=self.epochs,
                loads=self._loads,
                on_stored=self._on_stored,
            )
        self.states = StateCheckpoints(
            groups=groups,
            block_size=self.block_size,
            pools=self.pools,
            cached=self.cached,
            epochs=self.epochs,
            is_on=self._share,
        )
        self.has_state = bool(self.states.state_groups)
        self.pins = Pins(
            groups=groups,
            block_size=self.block_size,
            pools=self.pools,
            cached=self.cached,
            epochs=self.epochs,
            gets_state=self.states.is_target,
        )
        self._holders: list[StateCheckpoints | PrefixLoads] = []
        """What holds pages besides leases and the tree."""
        if self.has_state:
            self._holders.append(self.states)
        if self.tier is not None or self.peers is not None:
            self._holders.append(self._loads)
        self._promises: dict[StepId, list[Node]] = {}
        self._held = [0] * len(groups)
        """Per group, private pages of all leases."""
        self.partial_blocks = PartialBlocks(
            groups=groups,
            block_size=self.block_size,
            cached=self.cached,
            epochs=self.epochs,
            held=self._held,
            is_on=share and has_partial_blocks,
        )

    # -- finding and taking a prefix ---------------------------------------------------------

    def probe(self, namespace: bytes, tokens: bytes | bytearray, limit: int) -> Match:
        """Longest prefix of ≤ `limit` tokens that is valid in every group. Changes nothing."""
        if not self._share:
            return Match([], 0)
        keys = block_keys(tokens, self.block_size, 0, limit // self.block_size)
        path = list(self.tree.walk(self.weights + namespace, keys))
        depth = len(path)
        while depth and not all(
            node.pages[g]
            for g, group in enumerate(self.groups)
            for node in path[group.first_needed(self.block_size, depth) : depth]
        ):
            depth -= 1
        fork = len(path) * self.block_size
        del path[depth:]
        partial = self.partial_blocks.find(self.weights + namespace, path, tokens, limit)
        found = depth * self.block_size + (partial.tokens if partial else 0)
        return Match(path, found, fork, partial)

    def lease(
        self, slot: SlotId, namespace: bytes, match: Match, priority: int
    ) -> tuple[Lease, list[PageGrant]]:
        """Lock a matched prefix for a request that takes `slot`. The match must be fresh."""
        lease = Lease(slot, self.weights + namespace, priority, list(match.path), fork=match.fork)
        grants: list[PageGrant] = []
        depth = len(match.path)
        for node in match.path:
            self.cached.touch(node, priority)
            if self.tier is not None:
                self.tier.on_used(node)
        for g, group in enumerate(self.groups):
            lease.tables.append([])
            lease.private.append({})
            lease.locked.append({})
            first = group.first_needed(self.block_size, depth)
            for index in range(first, depth):
                self._lock(lease, g, index, match.path[index])
            if depth and group.kind != STATE:  # a state is copied, not shared
                lease.tables[g] += [PADDING_PAGE] * (first * self.block_size // group.page_tokens)
                for node in match.path[first:]:
                    lease.tables[g] += node.pages[g]
                grants.append(PageGrant(slot, g, 0, list(lease.tables[g])))
        if match.partial is not None:
            self.cached.touch(match.partial.node, priority)
            self.partial_blocks.lock(lease, match.partial)
        return lease, grants

    def grow(self, lease: Lease, tokens: int) -> list[PageGrant] | None:
        """Give the lease pages for `tokens` positions; None (and nothing changed) if too few are
        free.
        """
        wanted = lease.missing_pages(self.groups, tokens)
        if not any(wanted):
            return []
        if not self.capacity.make_free(wanted):
            return None
        grants: list[PageGrant] = []
        for g, count in enumerate(wanted):
            if not count:
                continue
            first = len(lease.tables[g])
            pages = self.pools[g].take(count)
            self._held[g] += count
            lease.tables[g] += pages
            lease.private[g].update(zip(range(first, first + count), pages, strict=True))
            grants.append(PageGrant(lease.slot, g, first, pages))
        return grants

    # -- sharing computed blocks --------------------------------------------------------------

    def publish(
        self, lease: Lease, tokens: bytes | bytearray, computed: int, step: StepId, writer: str
    ) -> None:
        """Move the blocks below `computed` tokens into the tree.

        Args:
            step: the step that writes them; they are promised until it completes. NO_STEP = they
                are written already.
            writer: id of the request.
        """
        if not self._share:
            return
        last = computed // self.block_size
        for key in block_keys(tokens, self.block_size, len(lease.path), last):
            parent = lease.path[-1] if lease.path else None
            if parent is not None and not parent.is_attached:
                return  # the prefix was wrong: its users are about to recompute
            node, is_new = self.tree.insert(lease.namespace, parent, key)
            index = len(lease.path)
            lease.path.append(node)
            if is_new:
                node.priority = lease.priority
            took = [
                self._hand_over(lease, g, index, node)
                for g, group in enumerate(self.groups)
                if group.kind != STATE
            ]
            if step != NO_STEP and any(took):
                node.promised, node.writer = step, writer
                self._promises.setdefault(step, []).append(node)
            elif any(took):
                self._on_complete(node)

    def slide(self, lease: Lease, lowest: int) -> None:
        """Release window pages that no row starting at `lowest` or later reads."""
        for g, group in enumerate(self.groups):
            if group.kind != WINDOW:
                continue
            first = group.first_read(lowest)
            epoch = self.epochs.now()
            gone = [i for i in lease.private[g] if (i + 1) * group.page_tokens <= first]
            for index in gone:
                lease.tables[g][index] = PADDING_PAGE
                self.pools[g].release([lease.private[g].pop(index)], epoch)
                self._held[g] -= 1
            for index in [i for i in lease.locked[g] if (i + 1) * self.block_size <= first]:
                self.cached.unlock(lease.locked[g].pop(index), g, epoch)

    # -- releasing ----------------------------------------------------------------------------

    def release(self, lease: Lease) -> None:
        """End a lease: free its private pages and its locks, after the current epoch."""
        epoch = self.epochs.now()
        self.partial_blocks.unlock(lease)
        for g in range(len(self.groups)):
            pages = list(lease.private[g].values())
            self._held[g] -= len(pages)
            self.pools[g].release(pages, epoch)
            for index in sorted(lease.locked[g], reverse=True):
                self.cached.unlock(lease.locked[g][index], g, epoch)
            lease.private[g].clear()
            lease.locked[g].clear()
        last = lease.path[-1] if lease.path and self.cached.has_only_states else None
        if last is not None and last.is_attached and not self.states.is_target(last):
            self.cached.trim(last)
        lease.path.clear()

    def settle(self, step: StepId) -> None:
        """A step is complete: its promises hold, and pages whose epochs have passed are free."""
        self.epochs.completed = step
        for node in self._promises.pop(step, ()):
            node.promised, node.writer = NO_STEP, ""
            self._on_complete(node)
        for pool in self.pools:
            pool.settle()

    def end_copies(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended, within the device or to and from a store or peer."""
        if self.has_state:
            self.states.end(ids, failed)
        self.partial_blocks.end((*ids, *failed))
        if self.tier is not None:
            self.tier.end(ids, failed)
        if self.peers is not None:
            self.peers.end(ids, failed)
        for pool in self.pools:
            pool.settle()

    def forget_promises(self, step: StepId, writer: str = "") -> list[Node]:
        """Drop the blocks that steps ≥ `step` promised (of one writer, or of all; rule R2).

        Returns the dropped subtrees' roots. Every lease with a detached node must recompute.
        """
        dropped: list[Node] = []
        for promised_at in sorted(s for s in self._promises if s >= step):
            for node in self._promises[promised_at]:
                if node.is_attached and writer in ("", node.writer):
                    self.cached.drop_subtree(node, self.epochs.now())
                    dropped.append(node)
        self.states.void(step, writer)
        return dropped

    def flush(self) -> None:
        """Evict everything that no request uses. Evicted pages are not written to the store."""
        self.cached.clear()
        if self.tier is not None:
            self.tier.forget_copies()
        if self.peers is not None:
            self.peers.forget_copies()

    # -- accounts -----------------------------------------------------------------------------

    @property
    def ledgers(self) -> list[Ledger]:
        """Page counts of each group."""
        return [
            Ledger(
                total=pool.total,
                free=pool.free,
                cached=self.cached.counts[g],
                held=self._held[g] + sum(len(part.held(g)) for part in self._holders),
                in_flight=pool.limbo,
            )
            for g, pool in enumerate(self.pools)
        ]

    def check(self, leases: list[Lease]) -> None:
        """Raise AssertionError unless every page has exactly one owner and every count is true."""
        self.cached.check()
        for g, (pool, ledger) in enumerate(zip(self.pools, self.ledgers, strict=True)):
            pool.check()
            assert not ledger.leaked, f"group {g}: {ledger} leaks {ledger.leaked} pages"
            owned = [p for lease in leases for p in lease.private[g].values()]
            assert len(owned) == self._held[g], f"group {g}: held {self._held[g]}, not {owned}"
            owned += [page for part in self._holders for page in part.held(g)]
            owned += [p for node in self.tree.nodes() for p in node.pages[g]]
            assert len(set(owned)) == len(owned), f"group {g}: a page has two owners"

    # -- details ------------------------------------------------------------------------------

    def _lock(self, lease: Lease, g: int, index: int, node: Node) -> None:
        self.cached.lock(node, g)
        lease.locked[g][index] = node

    def _hand_over(self, lease: Lease, g: int, index: int, node: Node) -> bool:
        """Move the lease's pages of one block to the node unless it has its own; lock it."""
        per_block = self.block_size // self.groups[g].page_tokens
        indices = range(index * per_block, (index + 1) * per_block)
        owns_all = all(i in lease.private[g] for i in indices)
        if owns_all and node.pages[g] and not node.locks[g] and node.promised == NO_STEP:
            self.cached.drop_copy(node, g)  # nothing reads these pages: keeping both is a waste
        takes = owns_all and not node.pages[g] and node.promised == NO_STEP
        if takes:
            pages = [lease.private[g].pop(i) for i in indices]
            self._held[g] -= len(pages)
            self._lock(lease, g, index, node)
            self.cached.attach(node, g, pages, self.epochs.now())
        elif self.groups[g].kind == FULL:
            self._lock(lease, g, index, node)
        return takes

    def _on_complete(self, node: Node) -> None:
        """The pages of a new node are written."""
        if self.tier is not None:
            self.tier.on_complete(node)
        self._on_stored(node)

    def _on_stored(self, node: Node) -> None:
        """The pages of a node are computed or loaded."""
        if self.events is not None:
            self.events.on_stored(node)

    def _on_evict(self, node: Node) -> None:
        """A node is about to lose its pages."""
        self.misses.on_evict(node)
        if self.tier is not None:
            self.tier.on_evict(node)

    def _on_removed(self, node: Node) -> None:
        """A node has left the tree."""
        if self.events is not None:
            self.events.on_removed(node)


def weights_id(version: str) -> bytes:
    """The value of `KVCache.weights` for a version of the weights."""
    return blake2b(version.encode(), digest_size=WEIGHTS_BYTES).digest()


def block_keys(
    tokens: bytes | bytearray, block_size: int, first: int, last: int
) -> Iterator[bytes]:
    """The tree's keys of blocks first … last−1."""
    size = block_size * TOKEN_BYTES
    return (bytes(tokens[i * size : (i + 1) * size]) for i in range(first, last))
