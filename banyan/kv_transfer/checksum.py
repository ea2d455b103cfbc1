"""The checksum that cache stores keep with each page."""

from functools import lru_cache
from hashlib import blake2b, shake_128

import numpy as np

SUM_BYTES = 16
_WORD = 4


def checksum(head: bytes, payload: bytes | memoryview | np.ndarray) -> bytes:
    """Checksum of a page under its name, SUM_BYTES long.

    It detects errors of memory, disks and networks. A cryptographic hash of a page would cost as
    much as copying it five times. This is a multilinear hash (Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014): the sum of all 32-bit words, each times a random odd
    64-bit number, modulo 2^64. A change in one word is always detected; any other change is missed
    with probability 2^-32.

    Args:
        head: name of the page; all of it is hashed.
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


@lru_cache(maxsize=8)  # one size of page for each cache group
def _factors(count: int) -> np.ndarray:
    """[count] odd uint64; the same in every process."""
    drawn = np.frombuffer(shake_128(b"banyan page checksum").digest(8 * count), "<u8")
    return drawn | np.uint64(1)
