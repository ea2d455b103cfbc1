"""HostTier: KV pages in host memory (hierarchical cache), least recently used first out.

A store may follow it that outlives the process; it gets every page as well.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from banyan.kv_transfer.store import Missing, Store

Allocate = Callable[[int], np.ndarray]
"""Allocates host memory, [n] uint8, that the device can copy fastest (pinned)."""


class HostTier:
    """Satisfies Store.

    Args:
        capacity_bytes: of all pages; a larger page is not kept.
        next_tier: store that gets every page too; None = no store.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocate, next_tier: Store | None) -> None:
        self._capacity = capacity_bytes
        self._allocate = allocate
        self._next_tier = next_tier
        self._pages: OrderedDict[bytes, np.ndarray] = OrderedDict()
        """Least recently used first."""
        self._used = 0
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    def has(self, name: bytes) -> bool:
        with self._lock:
            if name in self._pages:
                return True
        return self._next_tier is not None and self._next_tier.has(name)

    def read(self, name: bytes) -> bytes | memoryview:
        with self._lock:
            page = self._pages.get(name)
            if page is not None:
                self._pages.move_to_end(name)
                return page.data
        if self._next_tier is None:
            raise Missing
        payload = self._next_tier.read(name)
        self._keep(name, payload)
        return payload

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        self._keep(name, payload)
        if self._next_tier is not None:
            self._next_tier.write(name, payload)

    def delete(self, name: bytes) -> None:
        with self._lock:
            page = self._pages.pop(name, None)
            self._used -= 0 if page is None else len(page)
        if self._next_tier is not None:
            self._next_tier.delete(name)

    def close(self) -> None:
        with self._lock:
            self._pages.clear()
            self._used = 0
        if self._next_tier is not None:
            self._next_tier.close()

    def _keep(self, name: bytes, payload: bytes | memoryview) -> None:
        size = len(payload)
        if size > self._capacity:
            return
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
                return
            while self._used + size > self._capacity:
                _, gone = self._pages.popitem(last=False)
                self._used -= len(gone)
            page = self._allocate(size)
            page[:] = np.frombuffer(payload, np.uint8)
            self._pages[name] = page
            self._used += size
