"""StoreTier: the hierarchical cache. Pages are written to a store that outlives the process, and
loaded from it.

Every block of a prefix has a key: a hash of the previous key and the block's tokens. The first
previous key is a hash of the namespace, so equal keys mean equal sequences of one tenant. The store
adds the identity of the weights (kv_transfer/store.py).

A node is written after the step that computed it is complete, because a promised page may prove
wrong. The bytes are read in plan order, so nothing needs a lock meanwhile. For loads see
kv_cache/loads.py.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from banyan.base.ids import NO_STEP
from banyan.kv_cache.loads import PrefixLoad, PrefixLoads
from banyan.kv_cache.page_pool import EpochTracker, PagePool
from banyan.kv_cache.radix_tree import Node
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.messages.plan import PageCopy, device_page, stored_page

WRITE_THROUGH = "write_through"
"""Write pages as soon as they are complete."""
WRITE_SELECTIVE = "write_through_selective"
"""Write pages when a second request uses them."""
WRITE_BACK = "write_back"
"""Write pages when they are evicted."""

KEY_BYTES = 32
_WRITES_WITH_ROWS = 4
"""Blocks that a step with rows writes; the rows wait until the bytes are read."""
_WRITES_ALONE = 16
_LOADING_SHARE = 4
"""At most 1 / this of a pool is loading."""


@dataclass(frozen=True)
class StoreRules:
    """When pages are written to a store, and how long requests wait for loads.

    Attributes:
        write: WRITE_THROUGH | WRITE_SELECTIVE | WRITE_BACK.
        prefetch: wait policy (scheduler/hicache_fetch.py).
        threshold: fewest missing tokens for a lookup.
        timeout_s, timeout_per_ki_s: longest wait in seconds, plus this per 1024 missing tokens;
            for the policy "timeout".
    """

    write: str = WRITE_THROUGH
    prefetch: str = "timeout"
    threshold: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_s: float = 0.25
    max_writes: int = 64
    """Most writes under way; each holds the bytes of one page in host memory."""
    is_attached: bool = True
    """A store is attached from the start; False = one may be attached later."""


@dataclass
class StoreTier:
    """The pages of one replica that are written to and loaded from a store.

    Requires that every group keeps every position with one page per block (`can_be_stored`).

    Args:
        pools, epochs, loads: of the cache.
        weights: id of the weights whose pages are stored. The store knows only the weights of the
            start.
        on_stored: called with a node whose pages were loaded.
    """

    pools: list[PagePool]
    epochs: EpochTracker
    loads: PrefixLoads
    rules: StoreRules
    weights: bytes = b""
    on_stored: Callable[[Node], None] = lambda node: None
    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    """For the next plan, in order."""
    _backlog: deque[Node] = field(default_factory=deque[Node])
    _writes: dict[int, None] = field(default_factory=dict[int, None])
    """Ids of writes under way."""
    loading: dict[bytes, PrefixLoad] = field(default_factory=dict[bytes, PrefixLoad])
    """Store key of each loading block -> its load."""

    def __post_init__(self) -> None:
        self._backlog = deque(maxlen=min(pool.total for pool in self.pools))

    # -- attaching a store --------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether a store is attached."""
        return self.rules.is_attached

    @property
    def pending(self) -> int:
        """Blocks and copies that wait to be written, or are being written."""
        return len(self._backlog) + len(self._writes)

    def attach(self, rules: StoreRules) -> None:
        """Attach a store. No step and no copy is in flight. With write-through, everything on the
        device is queued, because the store may lack it.
        """
        assert not self.is_attached and rules.is_attached
        self.rules = rules
        if rules.write == WRITE_THROUGH:
            for node in self.loads.cached.tree.nodes():
                self._queue(node)

    def detach(self) -> None:
        """Detach the store; pages on the device stay. No step and no load is in flight, but writes
        may still end.
        """
        assert not self.loading and not self.copies
        self.rules = replace(self.rules, is_attached=False)
        self._backlog.clear()
        self._writes.clear()
        for node in self.loads.cached.tree.nodes():
            node.is_stored = False

    # -- to the store -------------------------------------------------------------------------

    def on_complete(self, node: Node) -> None:
        """The step that wrote the node's pages is complete."""
        if self.rules.write == WRITE_THROUGH:
            self._queue(node)

    def on_used(self, node: Node) -> None:
        """One more request uses the node."""
        if self.rules.write == WRITE_SELECTIVE:
            self._queue(node)

    def on_evict(self, node: Node) -> None:
        """The node is about to be evicted."""
        is_wanted = self.is_attached and self.rules.write == WRITE_BACK
        if is_wanted and len(self._writes) < self.rules.max_writes:
            self._write(node)

    def take_copies(self, has_rows: bool) -> list[PageCopy]:
        """Copies for the next plan, with as many queued writes as one step should carry."""
        most = _WRITES_WITH_ROWS if has_rows else _WRITES_ALONE
        for _ in range(min(most, len(self._backlog))):
            if len(self._writes) >= self.rules.max_writes:
                break
            self._write(self._backlog.popleft())
        taken, self.copies = self.copies, []
        return taken

    def forget_copies(self) -> None:
        """Drop the writes that are in no plan yet; a flush discards pages without storing them."""
        for copy in self.copies:
            assert copy.id in self._writes, "a load waits for a plan"
            del self._writes[copy.id]
        self.copies = []

    def _queue(self, node: Node) -> None:
        if self.is_attached and not node.is_stored:
            self._backlog.append(node)

    def _write(self, node: Node) -> None:
        if (
            node.is_stored
            or node.is_tail
            or node.promised != NO_STEP
            or not (node.is_attached and all(node.pages))
        ):
            return
        node.is_stored = True
        key = self._key_of(node)
        if not key:
            return
        for g, (page,) in enumerate(node.pages):
            copy_id = self.epochs.new_copy()
            self._writes[copy_id] = None
            self.copies.append(PageCopy(copy_id, g, device_page(page), stored_page(key), "before"))

    # -- from the store -----------------------------------------------------------------------

    def load_capacity(self) -> int:
        """Blocks that may be loaded in addition, if pages are free."""
        most = min(pool.total for pool in self.pools) // _LOADING_SHARE
        return max(0, max(1, most) - len(self.loading))

    def load(
        self,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        keys: Sequence[bytes],
    ) -> PrefixLoad | None:
        """Begin to load the blocks after `path`, a fresh match. None (and nothing begun) if too few
        pages are free.

        Args:
            tree_keys, keys: of these blocks in the tree and in the store.
        """
        sources = [[[stored_page(key)]] * len(self.pools) for key in keys]
        begun = self.loads.begin(namespace, path, tree_keys, sources)
        if begun is None:
            return None
        load, copies = begun
        self.copies += copies
        load.names = list(keys)
        for key in keys:
            assert key not in self.loading
            self.loading[key] = load
        return load

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended. Ids of other owners are ignored."""
        for copy_id in (*ids, *failed):
            self._writes.pop(copy_id, None)
            self.loads.end(copy_id, copy_id not in failed, self._on_settled)

    def _on_settled(self, load: PrefixLoad, at: int, node: Node | None) -> None:
        if load.names:
            del self.loading[load.names[at]]
        if node is None:
            return
        if load.names:
            node.is_stored, node.key_hash = True, load.names[at]
        else:  # another server has sent it
            self.on_complete(node)
        self.on_stored(node)

    def _key_of(self, node: Node) -> bytes:
        """The store's key of a node; b"" if its weights are not stored. Also sets keys above it."""
        chain: list[Node] = []
        at = node
        while not at.key_hash:
            above = at.parent
            assert above is not None
            if above.parent is None:  # the namespace
                if not at.key.startswith(self.weights):
                    return b""
                at.key_hash = _root_key(at.key)
            else:
                chain.append(at)
                at = above
        key = at.key_hash
        for below in reversed(chain):
            key = below.key_hash = _next_key(key, below.key)
        return key


def store_keys(namespace: bytes, tree_keys: Sequence[bytes]) -> list[bytes]:
    """The store's keys of a prefix's blocks, from the first one."""
    found: list[bytes] = []
    key = _root_key(namespace)
    for tree_key in tree_keys:
        key = _next_key(key, tree_key)
        found.append(key)
    return found


def can_be_stored(groups: Sequence[CacheGroup]) -> bool:
    return all(g.kind == FULL and g.page_tokens == groups[0].page_tokens for g in groups)


def _root_key(namespace: bytes) -> bytes:
    return blake2b(namespace, digest_size=KEY_BYTES, person=b"banyan tenant").digest()


def _next_key(key: bytes, tree_key: bytes) -> bytes:
    return blake2b(key + tree_key, digest_size=KEY_BYTES).digest()
