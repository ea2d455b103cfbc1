"""StoreTier: which pages go to the store that outlives the process, and which come back.

Every unit of a prefix has a key: a hash of the key before it and its own tokens, the first of the
namespace, so that equal keys mean equal sequences of one tenant. The store's own names add whose
weights they are (kv_transfer/identity.py).

A node's pages go to the store once the step that wrote them is complete: what is promised may prove
wrong. Their bytes are taken in the order of plans, so nothing is locked meanwhile. How pages come
back is said in kv_cache/loads.py.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from banyan.base.ids import NO_STEP
from banyan.kv_cache.epochs import EpochTracker
from banyan.kv_cache.groups import FULL, CacheGroup
from banyan.kv_cache.loads import PrefixLoad, PrefixLoads
from banyan.kv_cache.page_pool import PagePool
from banyan.kv_cache.radix_tree import Node
from banyan.messages.plan import PageCopy, device_page, stored_page

WRITE_THROUGH = "write_through"
"""Pages are written as soon as they are complete."""
WRITE_SELECTIVE = "write_through_selective"
"""Pages are written when a second request uses them."""
WRITE_BACK = "write_back"
"""Pages are written when they are evicted."""

KEY_BYTES = 32
_WRITES_BESIDE_ROWS = 4
"""Units whose bytes one step takes before its rows, which wait for that."""
_WRITES_ALONE = 16
_LOADING_SHARE = 4
"""At most 1 / this of a pool waits for the store."""


@dataclass(frozen=True)
class StoreRules:
    """What is kept in a store, and for how long a request waits for it.

    Attributes:
        write: WRITE_THROUGH | WRITE_SELECTIVE | WRITE_BACK.
        prefetch: a policy of scheduler/hicache_fetch.py.
        threshold: fewer tokens are not looked for.
        timeout_s, timeout_per_ki_s: most seconds that a request waits, and for each 1024 tokens
            that it looks for; where the policy has a bound.
    """

    write: str = WRITE_THROUGH
    prefetch: str = "timeout"
    threshold: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_s: float = 0.25
    max_writes: int = 64
    """Copies to the store under way; each holds the bytes of a page in the host's memory."""
    is_attached: bool = True
    """Whether there is a store from the start; one may be attached later."""


@dataclass
class StoreTier:
    """The pages of one replica that go to and come from a store. Every group keeps every position,
    one page for each unit (`can_be_stored`).

    Args:
        pools, horizon, loads: of the cache.
        came: called with a node whose pages have come from the store.
        weights: what the namespaces begin with whose pages are stored. The store's identity knows
            the weights of the start only.
    """

    pools: list[PagePool]
    epochs: EpochTracker
    loads: PrefixLoads
    rules: StoreRules
    weights: bytes = b""
    came: Callable[[Node], None] = lambda node: None
    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    """For the next plan, in the order in which they were decided."""
    _backlog: deque[Node] = field(default_factory=deque[Node])
    _writes: dict[int, None] = field(default_factory=dict[int, None])
    """Copies to the store under way."""
    _loading: dict[bytes, PrefixLoad] = field(default_factory=dict[bytes, PrefixLoad])
    """By key of a unit under way, its load."""

    def __post_init__(self) -> None:
        self._backlog = deque(maxlen=min(pool.total for pool in self.pools))

    # -- which store --------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether there is a store."""
        return self.rules.is_attached

    @property
    def pending(self) -> int:
        """Units and copies that are on their way to the store, or wait for it."""
        return len(self._backlog) + len(self._writes)

    def attach(self, rules: StoreRules) -> None:
        """There is a store from here on, which may lack all that the device holds. No step and no
        copy is in flight."""
        assert not self.is_attached and rules.is_attached
        self.rules = rules
        if rules.write == WRITE_THROUGH:
            for node in self.loads.tree.nodes():
                self._note(node)

    def detach(self) -> None:
        """There is no store any more; what the device holds stays. No step and no load is in
        flight; copies that were under way may still end."""
        assert not self._loading and not self.copies
        self.rules = replace(self.rules, is_attached=False)
        self._backlog.clear()
        self._writes.clear()
        for node in self.loads.tree.nodes():
            node.is_stored = False

    # -- to the store -------------------------------------------------------------------------

    def complete(self, node: Node) -> None:
        """The node's pages hold what its key says, and no step can prove them wrong."""
        if self.rules.write == WRITE_THROUGH:
            self._note(node)

    def used(self, node: Node) -> None:
        """One more request uses the node."""
        if self.rules.write == WRITE_SELECTIVE:
            self._note(node)

    def leaving(self, node: Node) -> None:
        """The node is about to be evicted."""
        is_wanted = self.is_attached and self.rules.write == WRITE_BACK
        if is_wanted and len(self._writes) < self.rules.max_writes:
            self._write(node)

    def plan_writes(self, has_rows: bool) -> None:
        """Begin to write what waits for it, as much as one step should take on."""
        most = _WRITES_BESIDE_ROWS if has_rows else _WRITES_ALONE
        for _ in range(min(most, len(self._backlog))):
            if len(self._writes) >= self.rules.max_writes:
                return
            self._write(self._backlog.popleft())

    def forget_copies(self) -> None:
        """Leave out what no plan has begun; only pages that were just evicted may be written so."""
        for copy in self.copies:
            assert copy.id in self._writes, "a load waits for a plan"
            del self._writes[copy.id]
        self.copies = []

    def take_copies(self) -> list[PageCopy]:
        taken, self.copies = self.copies, []
        return taken

    def _note(self, node: Node) -> None:
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

    def keys(self, namespace: bytes, tree_keys: Sequence[bytes]) -> list[bytes]:
        """The store's keys of the units of a prefix, from the first one on."""
        found: list[bytes] = []
        key = _root_key(namespace)
        for tree_key in tree_keys:
            key = _next_key(key, tree_key)
            found.append(key)
        return found

    def load_of(self, key: bytes) -> PrefixLoad | None:
        """The load that brings the unit of this key, if one does."""
        return self._loading.get(key)

    @property
    def loading(self) -> int:
        """Units under way."""
        return len(self._loading)

    def room(self) -> int:
        """Units that may be loaded beside those that are, if the pools can give them."""
        most = min(pool.total for pool in self.pools) // _LOADING_SHARE
        return max(0, max(1, most) - len(self._loading))

    def load(
        self,
        namespace: bytes,
        path: Sequence[Node],
        tree_keys: Sequence[bytes],
        keys: Sequence[bytes],
    ) -> PrefixLoad | None:
        """Begin to bring the units after `path`, a fresh match; None (and nothing begun) without
        room.

        tree_keys, keys: of these units in the tree and in the store.
        """
        sources = [[[stored_page(key)]] * len(self.pools) for key in keys]
        begun = self.loads.begin(namespace, path, tree_keys, sources)
        if begun is None:
            return None
        load, copies = begun
        self.copies += copies
        load.names = list(keys)
        for key in keys:
            assert key not in self._loading
            self._loading[key] = load
        return load

    def end(self, ids: list[int], failed: list[int]) -> None:
        """Copies have ended; those that are not this tier's are left alone."""
        for copy_id in (*ids, *failed):
            self._writes.pop(copy_id, None)
            self.loads.end(copy_id, copy_id not in failed, self._passed)

    def _passed(self, load: PrefixLoad, at: int, node: Node | None) -> None:
        del self._loading[load.names[at]]
        if node is not None:
            node.is_stored, node.key_hash = True, load.names[at]
            self.came(node)

    def _key_of(self, node: Node) -> bytes:
        """The store's key of a node, b"" when it has none; those above it keep theirs as well."""
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


def can_be_stored(groups: Sequence[CacheGroup]) -> bool:
    return all(g.kind == FULL and g.page_tokens == groups[0].page_tokens for g in groups)


def _root_key(namespace: bytes) -> bytes:
    return blake2b(namespace, digest_size=KEY_BYTES, person=b"banyan tenant").digest()


def _next_key(key: bytes, tree_key: bytes) -> bytes:
    return blake2b(key + tree_key, digest_size=KEY_BYTES).digest()
