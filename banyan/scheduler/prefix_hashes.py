"""What prompts a server has seen, remembered as hashes of their beginnings.

A prompt is cut into blocks, and the key of a block is a hash of all up to its end: two prompts
share as many keys as they share blocks at the start. So a tree of prefixes is a set of keys, its
memory is bounded by their number, and no text is kept.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

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
