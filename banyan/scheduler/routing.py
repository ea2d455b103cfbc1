"""Which of several replicas or servers takes a request: pure functions of what they have taken on.

`total_requests` and `total_tokens` choose the replica with the least of it, the first of equals.
The rest is for a router of servers, which draws its own lots and remembers the prompts that a
server has seen as hashes of their beginnings; indices are positions among the servers that can take
the request.

A prompt is cut into blocks, and the key of a block is a hash of all up to its end: two prompts
share as many keys as they share blocks at the start. So a tree of prefixes is a set of keys, its
memory is bounded by their number, and no text is kept.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.base.table import Table

Route = Callable[[Sequence[int], Sequence[int], int], int]
"""(open requests of each living replica, their prompts plus the most they may produce in tokens,
requests routed so far) -> index of the replica that takes the next."""

FOLLOW_ROOM = "follow_bootstrap_room"
"""The method by which a request's bootstrap room selects the replica."""
ROUTES: Table[Route] = Table(
    "load balance method",
    {
        "round_robin": "banyan.scheduler.routing:round_robin",
        "total_requests": "banyan.scheduler.routing:total_requests",
        "total_tokens": "banyan.scheduler.routing:total_tokens",
        FOLLOW_ROOM: "banyan.scheduler.routing:round_robin",  # without a room
    },
)


def round_robin(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return routed % len(requests)


def total_requests(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(requests)), key=lambda i: (requests[i], i))


def total_tokens(requests: Sequence[int], tokens: Sequence[int], routed: int) -> int:
    return min(range(len(tokens)), key=lambda i: (tokens[i], i))


def power_of_two(requests: Sequence[int], first: int, second: int) -> int:
    """The less busy of two servers that were drawn."""
    return second if requests[second] < requests[first] else first


@dataclass(frozen=True)
class CacheAware:
    """When a prompt's cached beginning decides, and when the load does.

    Attributes:
        threshold: share of a prompt that a server must have seen to get it.
        most_apart, most_times: the busiest server has more requests than the idlest by more than
            so many, and more than so many times as many: then the load decides.
    """

    threshold: float = 0.3
    most_apart: int = 64
    most_times: float = 1.5


def cache_aware(
    requests: Sequence[int], seen: Sequence[float], held: Sequence[int], rule: CacheAware
) -> int:
    """The server that has most of the prompt; where none has enough of it, or the servers are too
    unequally busy, the idlest, among equals the one that remembers least.

    Args:
        requests: open at each server.
        seen: share of the prompt that each has seen at the beginning of another, in [0, 1].
        held: how much each remembers.
    """
    idlest = min(range(len(requests)), key=lambda i: (requests[i], held[i], i))
    low, high = requests[idlest], max(requests)
    if high - low > rule.most_apart and high > low * rule.most_times:
        return idlest
    best = min(range(len(seen)), key=lambda i: (-seen[i], requests[i], i))
    return best if seen[best] > rule.threshold else idlest


def bucket_bounds(lengths: Sequence[int], servers: int) -> list[int]:
    """Lengths at which prompts are parted, so that each server has about as much of them to
    compute: one bound fewer than there are servers.

    Args:
        lengths: of prompts as they come.
    """
    whole, seen, below, bounds = sum(lengths), 0, 0, list[int]()
    for length, count in sorted(Counter(lengths).items()):
        before, seen = seen, seen + length * count
        while len(bounds) < servers - 1 and seen * servers >= whole * (len(bounds) + 1):
            share = whole * (len(bounds) + 1) / servers
            bounds.append(below if before and share - before < seen - share else length)
        below = length
    return bounds


def bucket(requests: Sequence[int], length: int, bounds: Sequence[int], rule: CacheAware) -> int:
    """The server of prompts of this length; where servers are too unequally busy, the idlest."""
    idlest = min(range(len(requests)), key=lambda i: (requests[i], i))
    low, high = requests[idlest], max(requests)
    if len(bounds) != len(requests) - 1:
        return idlest
    if high - low > rule.most_apart and high > low * rule.most_times:
        return idlest
    return bisect_left(bounds, length)


def consistent_hashing(names: Sequence[str], key: str) -> int:
    """The server whose name scores highest with `key`: when one goes, only its keys move."""

    def score(i: int) -> bytes:
        return hashlib.blake2b(f"{names[i]}\0{key}".encode(), digest_size=8).digest()

    return max(range(len(names)), key=score)


BLOCK_BYTES = 64
MAX_BLOCKS = 2048
"""Of one prompt; what follows them is not compared."""
_ID_BYTES = array("i").itemsize


def prefix_keys(prompt: bytes) -> list[bytes]:
    """The keys of the whole blocks of a prompt, at most MAX_BLOCKS, in order."""
    count = min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS)
    running = hashlib.blake2b(digest_size=8)
    keys: list[bytes] = []
    for at in range(count):
        running.update(prompt[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES])
        keys.append(running.digest())
    return keys


class Prefixes:
    """The keys that one server has seen; the least recently used go first.

    Args:
        most_blocks: how many are remembered; each takes about 200 bytes.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys have been seen. Changes nothing."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember a prompt. Ends of prompts are forgotten before their beginnings."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def check(self) -> None:
        """AssertionError when more is held than was allowed."""
        assert len(self._keys) <= self._most, (len(self._keys), self._most)


def token_keys(tokens: Sequence[int], block: int) -> list[bytes]:
    """As `prefix_keys`, of whole blocks of so many tokens."""
    count = min(len(tokens) // block, MAX_BLOCKS)
    whole, keys, above = array("i", tokens[: count * block]).tobytes(), list[bytes](), b""
    for at in range(0, len(whole), block * _ID_BYTES):
        above = _below(above, whole[at : at + block * _ID_BYTES])
        keys.append(above)
    return keys


def _below(above: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(above + tokens, digest_size=8).digest()


class Contents:
    """The units of prefixes that one engine says it holds, by the names that it gives them.

    Args:
        block: tokens of a unit.
        most: units that are kept; of more nothing is known.
    """

    def __init__(self, block: int, most: int = 1 << 20) -> None:
        self.block = block
        self.is_of_several = False
        """Prefixes of callers of their own are held too; of those nothing is known."""
        self._most = most
        self._keys: dict[int, bytes] = {}
        self._held: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    def stored(self, names: Sequence[int], parent: int | None, tokens: Sequence[int]) -> None:
        """Units that have come, each below the one before it. Those below one that is not known are
        passed over, and so are names without tokens."""
        above = b"" if parent is None else self._keys.get(parent)
        if above is None or len(tokens) != len(names) * self.block:
            return
        whole, size = array("i", tokens).tobytes(), self.block * _ID_BYTES
        for at, name in enumerate(names):
            above = _below(above, whole[at * size : (at + 1) * size])
            if name not in self._keys and len(self._keys) < self._most:
                self._keys[name] = above
                self._held[above] += 1

    def removed(self, names: Sequence[int]) -> None:
        for name in names:
            key = self._keys.pop(name, None)
            if key is None:
                continue
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def clear(self) -> None:
        self._keys.clear()
        self._held.clear()
        self.is_of_several = False

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of the first tokens are held, given the `token_keys` of units of this size."""
        for count, key in enumerate(keys):
            if key not in self._held:
                return count * self.block
        return len(keys) * self.block
