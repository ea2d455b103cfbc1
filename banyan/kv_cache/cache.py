"""KVCache: what the scheduler knows of memory. One radix tree, many groups, one pool per group.

A running request holds a Lease. Its page table in a FULL group looks like this:

    | cached: tree nodes that the lease locks | private: pages that the lease owns | not granted |
    0                                  path length × unit                      granted

Pages move from private to cached when they are full (`publish`). Where the tree already holds the
same unit from another writer, the lease locks that node too and keeps its own page private.

Knows page ids and counts; not tensors, not bytes, not when or why.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from banyan.base.ids import NO_STEP, PADDING_PAGE, PageId, SlotId, StepId
from banyan.disaggregation.peer_pages import PeerTier
from banyan.kv_cache.cache_events import CacheEvents
from banyan.kv_cache.epochs import EpochTracker
from banyan.kv_cache.eviction import EvictionKey
from banyan.kv_cache.groups import FULL, STATE, WINDOW, CacheGroup, common_block_size
from banyan.kv_cache.hierarchical_cache import StoreRules, StoreTier
from banyan.kv_cache.loads import PrefixLoads
from banyan.kv_cache.misses import Misses
from banyan.kv_cache.page_pool import PagePool
from banyan.kv_cache.partial_blocks import Part, PartialBlocks
from banyan.kv_cache.pins import Pins
from banyan.kv_cache.radix_tree import Node, RadixTree
from banyan.kv_cache.state_checkpoints import StateCopies
from banyan.messages.plan import PageCopy, PageGrant

TOKEN_BYTES = 4
WEIGHTS_BYTES = 8
"""Of the name of the weights that pages are computed with."""


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


@dataclass
class Lease:
    """What one running request holds. Taken by `KVCache.lease`, ended by `KVCache.release`."""

    slot: SlotId
    namespace: bytes
    priority: int
    path: list[Node] = field(default_factory=list[Node])
    """Nodes of the prefix, from the root; all of them locked in the FULL groups."""
    tables: list[list[PageId]] = field(default_factory=list[list[PageId]])
    """Per group, page of each index; padding where a window page has gone."""
    private: list[dict[int, PageId]] = field(default_factory=list[dict[int, PageId]])
    """Per group, the table indices whose pages this lease owns."""
    locked: list[dict[int, Node]] = field(default_factory=list[dict[int, Node]])
    """Per group, path index -> node that this lease locks."""
    fork: int = 0
    """`Match.fork` of the prefix that it began with."""
    part: Part | None = None
    """What is to be copied behind the path, locked until then."""


@dataclass(frozen=True)
class Match:
    """Longest usable prefix of a request, found by `probe`; valid until the cache changes."""

    path: list[Node]
    tokens: int
    """Of the path and the part."""
    fork: int = 0
    """Tokens of the prefix that others have computed too, where a state of it would be of use."""
    part: Part | None = None
    """What a unit behind the path shares, whose pages are copied (kv_cache/partial_blocks.py)."""

    @property
    def whole_blocks(self) -> "Match":
        """Without the part."""
        return self if self.part is None else Match(self.path, self.tokens - self.part.tokens)


class KVCache:
    """Pools, tree and leases of one replica.

    Args:
        groups: cache groups in plan order.
        eviction_key: which unlocked node goes first.
        share: False turns the radix tree off (nothing is published or matched); with peers, which
            hand over by it, it keeps requests apart in it.
        store: what goes to a store and comes from it; None without one.
        tells: `news` has what comes and goes.
        has_peers: pages go to other servers, or come from them.
        has_parts: prefixes may end within a unit.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        eviction_key: EvictionKey,
        share: bool = True,
        store: StoreRules | None = None,
        tells: bool = False,
        has_peers: bool = False,
        has_parts: bool = True,
    ) -> None:
        self.groups = groups
        self.block_size = common_block_size(groups)
        self.epochs = EpochTracker()
        self.weights = bytes(WEIGHTS_BYTES)
        """Name of those that pages are computed with from here on, in front of every namespace:
        pages of different weights are never shared."""
        self.pools = [PagePool(g.num_pages, self.epochs) for g in groups]

        def leaving(node: Node) -> None:
            self.misses.leaving(node)
            if self.tier is not None:
                self.tier.leaving(node)

        self.tree = RadixTree(
            groups,
            eviction_key,
            lambda g, pages, epoch: self.pools[g].release(pages, epoch),
            leaving,
            lambda node: None if self.news is None else self.news.gone(node),
            self.block_size,
        )
        self.news = CacheEvents() if tells and share else None
        self.misses = Misses(self.tree, self.block_size, share)
        self.is_apart = has_peers and not share
        """Each request is to have a namespace of its own."""
        self._share = share or has_peers
        self._loads = PrefixLoads(self.pools, self.tree, self.epochs, self._make_room)
        self.tier: StoreTier | None = None

        def came(node: Node) -> None:
            if self.news is not None:
                self.news.stored(node)

        if store is not None and share:
            self.tier = StoreTier(
                *(self.pools, self.epochs, self._loads, store, self.weights), came
            )
        self.peers: PeerTier | None = None
        if has_peers:
            self.peers = PeerTier(
                *(groups, self.block_size, self.epochs, self._loads),
                lambda group, depth: _first_needed(group, self.block_size, depth),
                came,
            )
        self.states = StateCopies(groups, self.pools, self.tree, self.epochs)
        self.pins = Pins(
            *(groups, self.block_size, self.pools, self.tree, self.epochs),
            lambda group, blocks: _first_needed(group, self.block_size, blocks),
            self.states.is_target,
        )
        self.has_state = bool(self.states.state_groups)
        self._promises: dict[StepId, list[Node]] = {}
        self._held = [0] * len(groups)
        """Per group, private pages of all leases."""
        self.parts = PartialBlocks(
            *(groups, self.block_size, self.tree, self.epochs, self._held),
            is_on=share and has_parts,
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
            for node in path[_first_needed(group, self.block_size, depth) : depth]
        ):
            depth -= 1
        fork = len(path) * self.block_size
        del path[depth:]
        part = self.parts.find(self.weights + namespace, path, tokens, limit)
        return Match(path, depth * self.block_size + (part.tokens if part else 0), fork, part)

    def lease(
        self, slot: SlotId, namespace: bytes, match: Match, priority: int
    ) -> tuple[Lease, list[PageGrant]]:
        """Lock a matched prefix for a request that takes `slot`. The match must be fresh."""
        lease = Lease(slot, self.weights + namespace, priority, list(match.path), fork=match.fork)
        grants: list[PageGrant] = []
        depth = len(match.path)
        for node in match.path:
            self.tree.touch(node, priority)
            if self.tier is not None:
                self.tier.used(node)
        for g, group in enumerate(self.groups):
            lease.tables.append([])
            lease.private.append({})
            lease.locked.append({})
            first = _first_needed(group, self.block_size, depth)
            for index in range(first, depth):
                self._lock(lease, g, index, match.path[index])
            if depth and group.kind != STATE:  # a state is copied, not shared
                lease.tables[g] += [PADDING_PAGE] * (first * self.block_size // group.page_tokens)
                for node in match.path[first:]:
                    lease.tables[g] += node.pages[g]
                grants.append(PageGrant(slot, g, 0, list(lease.tables[g])))
        if match.part is not None:
            self.tree.touch(match.part.node, priority)
            self.parts.lock(lease, match.part)
        return lease, grants

    def restores(self, lease: Lease, row: int, step: StepId) -> list[PageCopy]:
        """Copies that bring the states of a matched prefix, or the pages of its part, into the
        lease's own."""
        copies = self.parts.begin(lease, row)
        if not lease.path:
            return copies
        last = len(lease.path) - 1
        return copies + [
            self.states.restore(lease.locked[g].pop(last), g, lease.tables[g][0], row, step)
            for g in self.states.state_groups
        ]

    def missing(self, lease: Lease, tokens: int) -> list[int]:
        """Per group, pages still to be taken so that `tokens` positions have a place."""
        return [
            max(0, group.pages_for(tokens) - len(lease.tables[g]))
            for g, group in enumerate(self.groups)
        ]

    def has_capacity(self, pages: list[int]) -> bool:
        """Whether these pages per group are free, evictable, or on their way back."""
        return all(want <= self._in_reach(g) for g, want in enumerate(pages))

    def admits(self, match: Match, tokens: int, chunk: int, reserve: list[int]) -> bool:
        """Whether a request of `tokens` positions with this match fits beside `reserve` pages.

        `chunk` is the longest row: a WINDOW group never holds more than window + chunk positions.
        """
        for g, group in enumerate(self.groups):
            want = group.peak_pages(tokens, chunk)
            needed = match.path[_first_needed(group, self.block_size, len(match.path)) :]
            shared = sum(len(node.pages[g]) for node in needed) if group.kind != STATE else 0
            read = [*needed, *([match.part.node] if match.part else [])]
            idle = sum(len(node.pages[g]) for node in read if not node.locks[g])
            if max(0, want - shared) + reserve[g] > self._in_reach(g) - idle:
                return False
        return True

    def has_copies(self, lease: Lease) -> bool:
        """Whether the lease owns pages whose content the nodes of its path hold as well."""
        return any(
            index * group.page_tokens < len(lease.path) * self.block_size
            for g, group in enumerate(self.groups)
            if group.kind == FULL
            for index in lease.private[g]
        )

    def fits_alone(self, tokens: int, chunk: int) -> bool:
        """Whether a request of `tokens` positions could run with the whole cache to itself."""
        return all(
            group.peak_pages(tokens, chunk) <= pool.total
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def grow(self, lease: Lease, tokens: int) -> list[PageGrant] | None:
        """Give the lease pages for `tokens` positions; None (and nothing changed) without room."""
        wanted = self.missing(lease, tokens)
        if not any(wanted):
            return []
        if not self._make_room(wanted):
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

    # -- sharing what was computed ------------------------------------------------------------

    def publish(
        self, lease: Lease, tokens: bytes | bytearray, computed: int, step: StepId, writer: str
    ) -> None:
        """Move the units below `computed` tokens into the tree.

        `step` is the step that writes them (they are promised until it completes), NO_STEP when
        they are written already.
        """
        if not self._share:
            return
        for key in block_keys(
            tokens, self.block_size, len(lease.path), computed // self.block_size
        ):
            parent = lease.path[-1] if lease.path else None
            if parent is not None and not parent.is_attached:
                return  # the prefix proved wrong: its users are about to be recomputed
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
                _is_complete(node, self.tier, self.news)

    def slide(self, lease: Lease, lowest: int) -> None:
        """Let window pages go that no row starting at `lowest` or later reads."""
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
                self.tree.unlock(lease.locked[g].pop(index), g, epoch)

    def checkpoint_at(self, lease: Lease, known: int, start: int) -> int:
        """Where a row after `start` should end so that a state can be kept; 0 = anywhere.

        That is the last whole unit, and before it where the sequence leaves what others have
        computed: the next one that begins so, finds a state there.
        """
        if not (self.has_state and self._share):
            return 0
        border = lease.fork if lease.fork > start else known // self.block_size * self.block_size
        return border if border > start else 0

    def checkpoints(
        self, lease: Lease, end: int, row: int, step: StepId, writer: str
    ) -> list[PageCopy]:
        """Copies that keep the states of a prefix of `end` published tokens, if there is room."""
        if end != len(lease.path) * self.block_size or not lease.path[-1].is_attached:
            return []
        copies = [
            self.states.checkpoint(lease.path[-1], g, lease.tables[g][0], row, step, writer)
            for g in self.states.state_groups
        ]
        return [copy for copy in copies if copy is not None]

    # -- letting go ---------------------------------------------------------------------------

    def release(self, lease: Lease) -> None:
        """End a lease: private pages return, locks go, both stamped with what is in flight."""
        epoch = self.epochs.now()
        self.parts.let_go(lease)
        for g in range(len(self.groups)):
            pages = list(lease.private[g].values())
            self._held[g] -= len(pages)
            self.pools[g].release(pages, epoch)
            for index in sorted(lease.locked[g], reverse=True):
                self.tree.unlock(lease.locked[g][index], g, epoch)
            lease.private[g].clear()
            lease.locked[g].clear()
        last = lease.path[-1] if lease.path and self.tree.has_states_alone else None
        if last is not None and last.is_attached and not self.states.is_target(last):
            self.tree.trim(last)
        lease.path.clear()

    def settle(self, step: StepId) -> None:
        """A step is complete: its promises hold, and pages whose stamps have passed are free."""
        self.epochs.completed = step
        for node in self._promises.pop(step, ()):
            node.promised, node.writer = NO_STEP, ""
            _is_complete(node, self.tier, self.news)
        for pool in self.pools:
            pool.settle()

    def end_copies(self, ids: list[int], failed: list[int]) -> None:
        """Copies of states or of parts, or to and from the store, have ended."""
        self.states.end(ids, failed)
        self.parts.end((*ids, *failed))
        if self.tier is not None:
            self.tier.end(ids, failed)
        if self.peers is not None:
            self.peers.end(ids, failed)
        for pool in self.pools:
            pool.settle()

    def forget_promises(self, step: StepId, writer: str = "") -> list[Node]:
        """Rule R2's other half: drop what steps ≥ `step` promised (of one writer, or of all).

        Returns the dropped roots; every lease whose path has a detached node must recompute.
        """
        dropped: list[Node] = []
        for promised_at in sorted(s for s in self._promises if s >= step):
            for node in self._promises[promised_at]:
                if node.is_attached and writer in ("", node.writer):
                    self.tree.drop_subtree(node, self.epochs.now())
                    dropped.append(node)
        self.states.void(step, writer)
        return dropped

    def flush(self) -> None:
        """Evict everything that no request uses. What was not stored before is not stored."""
        self.tree.clear()
        if self.tier is not None:
            self.tier.forget_copies()
        if self.peers is not None:
            self.peers.forget_copies()

    # -- accounts -----------------------------------------------------------------------------

    def ledger(self, group: int) -> Ledger:
        pool = self.pools[group]
        loading = len(self._loads.held(group))
        held = self._held[group] + len(self.states.held(group)) + loading
        return Ledger(pool.total, pool.free, self.tree.cached[group], held, pool.limbo)

    def check(self, leases: list[Lease]) -> None:
        """Raise AssertionError unless every page has exactly one owner and every count is true."""
        self.tree.check()
        for g, pool in enumerate(self.pools):
            pool.check()
            ledger = self.ledger(g)
            assert not ledger.leaked, f"group {g}: {ledger} leaks {ledger.leaked} pages"
            owned = [p for lease in leases for p in lease.private[g].values()]
            assert len(owned) == self._held[g], f"group {g}: held {self._held[g]}, not {owned}"
            owned += self.states.held(g)
            owned += self._loads.held(g)
            owned += [p for node in self.tree.nodes() for p in node.pages[g]]
            assert len(set(owned)) == len(owned), f"group {g}: a page has two owners"

    # -- details ------------------------------------------------------------------------------

    def _lock(self, lease: Lease, g: int, index: int, node: Node) -> None:
        self.tree.lock(node, g)
        lease.locked[g][index] = node

    def _hand_over(self, lease: Lease, g: int, index: int, node: Node) -> bool:
        """Move the lease's pages of one unit to the node unless it has its own; lock it."""
        per_block = self.block_size // self.groups[g].page_tokens
        indices = range(index * per_block, (index + 1) * per_block)
        owns_all = all(i in lease.private[g] for i in indices)
        if owns_all and node.pages[g] and not node.locks[g] and node.promised == NO_STEP:
            self.tree.replace_pages(node, g)  # nobody reads them: keeping both would waste room
        takes = owns_all and not node.pages[g] and node.promised == NO_STEP
        if takes:
            pages = [lease.private[g].pop(i) for i in indices]
            self._held[g] -= len(pages)
            self._lock(lease, g, index, node)
            self.tree.attach(node, g, pages, self.epochs.now())
        elif self.groups[g].kind == FULL:
            self._lock(lease, g, index, node)
        return takes

    def _in_reach(self, g: int) -> int:
        return self.pools[g].free + self.pools[g].limbo + self.tree.evictable[g]

    def _make_room(self, wanted: list[int]) -> bool:
        """Evict what the pool lacks; pages on their way back are waited for, not evicted anew."""
        for g, count in enumerate(wanted):
            shortage = count - self.pools[g].free - self.pools[g].limbo
            if shortage > 0:
                self.tree.evict(g, shortage)
        return all(count <= self.pools[g].free for g, count in enumerate(wanted))


def _is_complete(node: Node, tier: StoreTier | None, news: CacheEvents | None) -> None:
    """The pages of a new node are written."""
    if tier is not None:
        tier.complete(node)
    if news is not None:
        news.stored(node)


def name_of_weights(version: str) -> bytes:
    """What `KVCache.weights` is from when these are taken on."""
    return blake2b(version.encode(), digest_size=WEIGHTS_BYTES).digest()


def block_keys(
    tokens: bytes | bytearray, block_size: int, first: int, last: int
) -> Iterator[bytes]:
    """The tree's keys of units first … last−1."""
    size = block_size * TOKEN_BYTES
    return (bytes(tokens[i * size : (i + 1) * size]) for i in range(first, last))


def _first_needed(group: CacheGroup, block_size: int, depth: int) -> int:
    """Index of the first node whose pages a prefix of `depth` nodes needs in `group`."""
    if group.kind == WINDOW:
        return group.first_read(depth * block_size) // block_size
    return 0 if group.kind == FULL else max(0, depth - 1)
