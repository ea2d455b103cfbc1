"""Store: KV pages outside the process that computed them, by name. One protocol, one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
