"""Store: KV pages outside the process that computed them, by name. One protocol, one table.

Also the checksum that stores keep with each page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b, shake_128
from typing import Protocol

import numpy as np

from banyan.base.table import Table


class Missing(Exception):
    """The store has no such page."""


class Damaged(Exception):
    """The store has something under this name that is not the page; it has been removed."""


class Store(Protocol):
    """Pages by name. A name identifies the content, so a page is never overwritten.

    `has` and `read` run in one thread, `write` and `delete` in another. Failures are OSErrors; the
    caller does not retry.
    """

    @property
    def capacity_bytes(self) -> int:
        """Most bytes it keeps; the least recently used pages go first. 0 = limited elsewhere."""
        ...

    def has(self, name: bytes) -> bool: ...

    def read(self, name: bytes) -> bytes | memoryview:
        """A whole page, checked.

        Raises:
            Missing, Damaged, OSError.
        """
        ...

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        """Keep a page atomically: readers never see a part of it."""
        ...

    def delete(self, name: bytes) -> None:
        """Forget a page; unknown names do nothing."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store.

    Attributes:
        identity: 32 bytes that differ whenever pages of equal tokens may hold other bytes.
        page_bytes: size of a page of each group.
        extra: the store's own keys of --hicache-storage-backend-extra-config.
    """

    identity: bytes
    page_bytes: Sequence[int]
    extra: dict[str, object] = field(default_factory=dict[str, object])


OpenStore = Callable[[StoreOptions], Store]
"""Opens a store; ConfigError if it cannot."""

STORES: Table[OpenStore] = Table(
    "cache store",
    {
        "file": "banyan.kv_transfer.file_store:open_files",
        "mooncake": "banyan.kv_transfer.mooncake_store:open_mooncake_store",
        "nixl": "banyan.kv_transfer.nixl_store:open_nixl_files",
    },
    plugins="banyan.stores",
)


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
