"""Store: pages of the cache outside the process that computed them. One protocol, one table.

Knows names and bytes; not tokens, not requests, and not which pages are worth keeping.
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
    """Pages by name. A name stands for the page's content: it is never written differently.

    `has` and `read` run in one thread, `write` and `delete` in another. What goes wrong is an
    OSError; nothing is tried again here.
    """

    @property
    def capacity_bytes(self) -> int:
        """What it keeps at most; the pages used longest ago go first. 0 = others say that."""
        ...

    def has(self, name: bytes) -> bool: ...

    def read(self, name: bytes) -> bytes | memoryview:
        """A whole page, checked.

        Raises:
            Missing, Damaged, OSError.
        """
        ...

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        """Keep a page; nobody sees a part of it, whatever happens meanwhile."""
        ...

    def delete(self, name: bytes) -> None:
        """Forget a page; unknown names do nothing."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreOptions:
    """What a store is opened with.

    Attributes:
        identity: 32 bytes that differ whenever pages of equal tokens may hold other bytes.
        page_bytes: per group.
        extra: of --hicache-storage-backend-extra-config, what the engine does not take itself.
    """

    identity: bytes
    page_bytes: Sequence[int]
    extra: dict[str, object] = field(default_factory=dict[str, object])


OpenStore = Callable[[StoreOptions], Store]
"""Opens a store; ConfigError when that cannot be."""

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
