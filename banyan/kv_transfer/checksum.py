"""Checksum of a page in a store: tells accidents of memory, disks and networks, quickly.

A cryptographic hash of a page costs as much as copying it five times over. This one is a
multilinear hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): the sum over
all 32-bit words of the word times a random odd 64-bit number, modulo 2^64. A change in one word
always shows; any other goes unseen with a chance of 2^-32. The page's name is hashed beside it.
"""

from functools import lru_cache
from hashlib import blake2b, shake_128

import numpy as np

SUM_BYTES = 16
_WORD = 4


def checksum(head: bytes, payload: bytes | memoryview | np.ndarray) -> bytes:
    """SUM_BYTES that stand for a page under its name.

    Args:
        head: what the page is called; all of it is hashed.
    """
    content = np.frombuffer(payload, np.uint8)
    whole = len(content) // _WORD * _WORD
    words = content[:whole].view(np.uint32)
    total = int(np.einsum("i,i->", words, _factors(len(words)))) if len(words) else 0
    made = blake2b(head, digest_size=SUM_BYTES)
    made.update(len(content).to_bytes(8, "little") + (total & _MASK).to_bytes(8, "little"))
    made.update(content[whole:].tobytes())
    return made.digest()


_MASK = (1 << 64) - 1


@lru_cache(maxsize=8)  # pages have as many sizes as there are groups
def _factors(count: int) -> np.ndarray:
    """[count] uint64, odd; the same everywhere."""
    drawn = np.frombuffer(shake_128(b"banyan page checksum").digest(8 * count), "<u8")
    return drawn | np.uint64(1)
