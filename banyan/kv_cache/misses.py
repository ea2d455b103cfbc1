"""Misses: why the cached prefix of a request ends where it does.

Evicted blocks are remembered for a while by the place they hung at, to distinguish
evicted tokens from tokens that no request has sent. A place is a hash that begins with the
namespace, so it reveals nothing about other tenants.
"""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from banyan.kv_cache.partial_blocks import shared_tokens
from banyan.kv_cache.radix_tree import Node, RadixTree

OFF = "disabled"
"""Prefixes are not shared: --disable-radix-cache, or a model that needs whole prompts."""
ASKED = "asked"
"""The request wants log-probabilities or hidden states from that position on."""
APART = "not_kept"
"""More is cached, but the layers with a window or a state have no pages there."""
EVICTED = "evicted"
"""More was cached, and has been evicted."""
PAGE = "page"
"""More is cached within a page, but only whole pages can be shared here."""
LOADING = "loading"
"""The store was loading it, or had not replied, and the request stopped waiting."""
STORED = "stored"
"""The store has it, but computing was expected to be faster, or no page was free to load it."""
UNREADABLE = "unreadable"
"""The store had it, but the load failed."""
UNSEEN = "unseen"
"""No request of this namespace has sent these tokens."""

_MOST = 1 << 14
_MOST_PER_PLACE = 64
_TOKEN_BYTES = 4
_PLACE_BYTES = 8


class Miss(NamedTuple):
    """Why no more tokens come from the cache."""

    reason: str = ""
    """ "" if nothing was missed."""
    eviction: int = 0
    """Number of the eviction, counted from 1; 0 = not evicted."""


class Misses:
    """
    Args:
        is_on: False = prefixes are not shared.
        num_pages: of the cache; no more evicted blocks are remembered than it could hold.
    """

    def __init__(self, tree: RadixTree, block_size: int, is_on: bool, num_pages: int) -> None:
        self._tree = tree
        self._block_size = block_size
        self._is_on = is_on
        self._most = min(_MOST, num_pages)
        self.evictions = 0
        """Blocks evicted so far."""
        self._gone: dict[bytes, dict[bytes, int]] = {}
        """Place -> keys of the blocks evicted below it (latest last) -> number of the eviction."""
        self._order: deque[tuple[bytes, bytes, int]] = deque()

    def on_evict(self, node: Node) -> None:
        """A node is being evicted."""
        assert node.parent is not None
        place = _place_of(node.parent)
        keys = self._gone.setdefault(place, {})
        self.evictions += 1
        keys.pop(node.key, None)
        keys[node.key] = self.evictions
        if len(keys) > _MOST_PER_PLACE:
            del keys[next(iter(keys))]
        self._order.append((place, node.key, self.evictions))
        while len(self._order) > self._most:
            place, key, eviction = self._order.popleft()
            keys = self._gone.get(place, {})
            if keys.get(key) == eviction:  # else it has come back and gone again since
                del keys[key]
            if not keys:
                self._gone.pop(place, None)

    def explain(
        self,
        namespace: bytes,
        path: Sequence[Node],
        found: int,
        tokens: bytes | bytearray,
        limit: int,
    ) -> Miss:
        """Why no more tokens come from the cache, where more would have been useful.

        Args:
            path: cached whole blocks; found: cached tokens.
            limit: most tokens that may come from the cache.
        """
        if not self._is_on:
            return Miss(OFF)
        if found >= limit:
            return Miss(ASKED)
        first = len(path) * self._block_size
        rest = bytes(
            tokens[first * _TOKEN_BYTES : min(limit, first + self._block_size) * _TOKEN_BYTES]
        )
        above = path[-1] if path else self._tree.top(namespace)
        if above is not None and rest in above.children:
            return Miss(APART)
        place = _below(b"", namespace) if above is None else _place_of(above)
        for key, eviction in reversed(self._gone.get(place, {}).items()):
            if first + shared_tokens(key, rest) > found:
                return Miss(EVICTED, eviction)
        neighbours = () if above is None else self._tree.neighbours(above, rest)
        if any(node and first + shared_tokens(node.key, rest) > found for node in neighbours):
            return Miss(PAGE)
        return Miss(UNSEEN)


def _place_of(node: Node) -> bytes:
    """Hash of the namespace and of all blocks down to a node."""
    below: list[Node] = []
    while not node.place and node.parent is not None:
        below.append(node)
        node = node.parent
    place = node.place or b""  # of a node whose place is known, or of the root
    for each in reversed(below):
        place = each.place = _below(place, each.key)
    return place


def _below(place: bytes, key: bytes) -> bytes:
    return blake2b(place + key, digest_size=_PLACE_BYTES).digest()
