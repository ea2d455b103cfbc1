"""CacheEvents: blocks added to and removed from the cache, for cache-aware routers.

A block is reported once the step that writes it is complete. Its name is 64 bits of a hash of the
previous block's name and its own tokens, starting with the namespace. So equal names mean equal
prefixes of one tenant and one version of the weights.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from banyan.kv_cache.radix_tree import Node

_NAME_BYTES = 8


class Stored(msgspec.Struct):
    """Added blocks, each the child of the one before it."""

    names: list[int]
    parent: int | None
    """None for the first block of a prefix."""
    tokens: bytearray
    """int32 ids of all blocks."""
    namespace: bytes


class Removed(msgspec.Struct):
    names: list[int]


class CacheEvents:
    """Events since the last `take`."""

    def __init__(self) -> None:
        self._events: list[Stored | Removed] = []
        self._names: dict[Node, int] = {}
        """Names of the reported blocks that are cached."""

    def take(self) -> Sequence[Stored | Removed]:
        taken, self._events = self._events, []
        return taken

    def on_stored(self, node: Node) -> None:
        """The pages of a node are complete."""
        if node in self._names or not node.is_attached:
            return
        assert node.parent is not None
        above = self._name_of(node.parent)
        name = self._names[node] = _name(above, node)
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.names[-1] == above:
            last.names.append(name)
            last.tokens += node.key
            return
        self._events.append(Stored([name], above, bytearray(node.key), _namespace(node)))

    def on_removed(self, node: Node) -> None:
        """A node has left the tree."""
        name = self._names.pop(node, None)
        if name is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.names.append(name)
        else:
            self._events.append(Removed([name]))

    def _name_of(self, node: Node) -> int | None:
        """None for a namespace. Also works for blocks that are not reported yet."""
        chain: list[Node] = []
        while node not in self._names and not _is_namespace(node):
            chain.append(node)
            assert node.parent is not None
            node = node.parent
        name = self._names.get(node)
        for below in reversed(chain):
            name = _name(name, below)
        return name


def _is_namespace(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _namespace(node: Node) -> bytes:
    while not _is_namespace(node):
        assert node.parent is not None
        node = node.parent
    return node.key


def _name(above: int | None, node: Node) -> int:
    """64 bits, signed."""
    start = (
        _namespace(node) if above is None else above.to_bytes(_NAME_BYTES, "little", signed=True)
    )
    digest = blake2b(start + node.key, digest_size=_NAME_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
