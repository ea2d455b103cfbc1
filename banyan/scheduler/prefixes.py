"""What prompts a server has seen, remembered as hashes of their beginnings.

A prompt is cut into blocks, and the key of a block is a hash of all up to its end: two prompts
share as many keys as they share blocks at the start. So a tree of prefixes is a set of keys, its
memory is bounded by their number, and no text is kept. Knows no servers and no time.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 64
MAX_BLOCKS = 2048
"""Of one prompt; what follows them is not compared."""


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
