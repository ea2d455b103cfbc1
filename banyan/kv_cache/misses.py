"""Misses: why the prefix that a request finds in the cache ends where it does.

What is evicted is remembered for a while by the place that it hung at, so that tokens which came
back too late are told from those that nobody has sent. A place is known by a hash that begins with
the namespace: nobody learns what others have sent.
"""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from banyan.kv_cache.partial_blocks import shared_tokens
from banyan.kv_cache.radix_tree import Node, RadixTree

OFF = "disabled"
"""Prompts are not shared: --disable-radix-cache, or a model that reads prompts whole."""
ASKED = "asked"
"""The request wants log-probabilities or hidden states of positions from there on."""
APART = "not_kept"
"""More of it is in the cache, but layers that keep a window or a state have theirs elsewhere."""
EVICTED = "evicted"
"""More of it was there, and made room for others."""
PAGE = "page"
"""More of it is there within a page, and pages are shared as a whole beside what is in use."""
LOADING = "loading"
"""A store was bringing it, or had not told whether it has it, and the request waited no longer."""
STORED = "stored"
"""A store has it, and computing it was expected to take less than reading it, or to read it there
was no room."""
UNREADABLE = "unreadable"
"""A store had it and could not bring it."""
UNSEEN = "unseen"
"""No request that shares a cache with this one has sent what comes there."""

_MOST = 1 << 14
_MOST_AT_ONE = 64
_TOKEN_BYTES = 4
_PLACE_BYTES = 8


class Miss(NamedTuple):
    """Why no more tokens come from the cache."""

    reason: str = ""
    """ "" where all come that could."""
    eviction: int = 0
    """Of what was evicted, which eviction that was: the first of all is 1."""


class Misses:
    """
    Args:
        unit: tokens of a node.
        is_on: False where nothing is shared.
    """

    def __init__(self, tree: RadixTree, block_size: int, is_on: bool) -> None:
        self._tree = tree
        self._block_size = block_size
        self._is_on = is_on
        self.evictions = 0
        """Units that have been evicted so far."""
        self._gone: dict[bytes, dict[bytes, int]] = {}
        """Place -> keys of units that were evicted below it, the latest last, and at which
        eviction."""
        self._order: deque[tuple[bytes, bytes, int]] = deque()

    def leaving(self, node: Node) -> None:
        """A node is being evicted."""
        assert node.parent is not None
        place = _place_of(node.parent)
        keys = self._gone.setdefault(place, {})
        self.evictions += 1
        keys.pop(node.key, None)
        keys[node.key] = self.evictions
        if len(keys) > _MOST_AT_ONE:
            del keys[next(iter(keys))]
        self._order.append((place, node.key, self.evictions))
        while len(self._order) > _MOST:
            place, key, eviction = self._order.popleft()
            keys = self._gone.get(place, {})
            if keys.get(key) == eviction:  # else it has come back and gone again since
                del keys[key]
            if not keys:
                self._gone.pop(place, None)

    def why(
        self,
        namespace: bytes,
        path: Sequence[Node],
        found: int,
        tokens: bytes | bytearray,
        limit: int,
        wanted: int,
    ) -> Miss:
        """Why no more tokens come from the cache.

        Args:
            path: whole units that come from it; found: tokens that do.
            limit: tokens that might, of the `wanted` ones of which nothing is asked.
        """
        if found >= wanted:
            return Miss()
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
        beside = () if above is None else self._tree.neighbours(above, rest)
        if any(node and first + shared_tokens(node.key, rest) > found for node in beside):
            return Miss(PAGE)
        return Miss(UNSEEN)


def _place_of(node: Node) -> bytes:
    """A hash of the namespace and of all units down to a node."""
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
