"""CacheEvents: which units of prefixes the cache has come to hold and has let go, for those who
send requests where their prefixes lie.

A unit is told once the step that writes it is complete. It is called by 64 bits of a hash of the
unit before it and its own tokens, the first one of the namespace, so that equal names mean equal
prefixes of one tenant and one set of weights.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from banyan.kv_cache.radix_tree import Node

_NAME_BYTES = 8


class Stored(msgspec.Struct):
    """Units that are there now, each the child of the one before it."""

    names: list[int]
    parent: int | None
    """None for the first unit of a prefix."""
    tokens: bytearray
    """int32 ids of all of them."""
    namespace: bytes


class Removed(msgspec.Struct):
    names: list[int]


class CacheEvents:
    """What has happened since it was last taken."""

    def __init__(self) -> None:
        self._news: list[Stored | Removed] = []
        self._names: dict[Node, int] = {}
        """Of the units that were told and are there."""

    def take(self) -> Sequence[Stored | Removed]:
        taken, self._news = self._news, []
        return taken

    def stored(self, node: Node) -> None:
        """The pages of a node are complete."""
        if node in self._names or not node.is_attached:
            return
        assert node.parent is not None
        above = self._name_of(node.parent)
        name = self._names[node] = _name(above, node)
        last = self._news[-1] if self._news else None
        if isinstance(last, Stored) and last.names[-1] == above:
            last.names.append(name)
            last.tokens += node.key
            return
        self._news.append(Stored([name], above, bytearray(node.key), _namespace(node)))

    def gone(self, node: Node) -> None:
        """A node has left the tree."""
        name = self._names.pop(node, None)
        if name is None:
            return
        last = self._news[-1] if self._news else None
        if isinstance(last, Removed):
            last.names.append(name)
        else:
            self._news.append(Removed([name]))

    def _name_of(self, node: Node) -> int | None:
        """None for a namespace; a unit that is not told yet has its name all the same."""
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
