"""What every cache store must do, whoever wrote it; and stores that misbehave."""

import threading
import time

import pytest

from banyan.kv_transfer.store import Missing, Store


def name(number: int) -> bytes:
    return bytes((0,)) + number.to_bytes(32, "little")


def page(number: int, size: int = 1000) -> bytes:
    return bytes((number * 31 + i) % 251 for i in range(size))


def check_store(store: Store) -> None:
    """Pages come back as they were written, by their own names only, until they are deleted."""
    assert not store.has(name(1))
    with pytest.raises(Missing):
        store.read(name(1))
    store.write(name(1), page(1))
    store.write(name(2), memoryview(page(2)))
    assert store.has(name(1)) and not store.has(name(3))
    assert bytes(store.read(name(1))) == page(1) and bytes(store.read(name(2))) == page(2)
    store.write(name(1), page(1))
    store.delete(name(1))
    store.delete(name(1))
    assert not store.has(name(1)) and store.has(name(2))
    assert store.capacity_bytes > 0


class MemoryStore:
    """Pages in a dictionary, with faults on demand.

    Attributes:
        gate: while it is clear, reads and writes wait.
        fails: what reads and writes raise; None for nothing.
    """

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self.delay_s = 0.0
        self.reads = 0
        self.is_closed = False

    @property
    def capacity_bytes(self) -> int:
        return 1 << 30

    def has(self, name: bytes) -> bool:
        return name in self.pages

    def read(self, name: bytes) -> bytes:
        self._suffer()
        self.reads += 1
        if name not in self.pages:
            raise Missing
        return self.pages[name]

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        self._suffer()
        self.pages[name] = bytes(payload)

    def delete(self, name: bytes) -> None:
        self.pages.pop(name, None)

    def close(self) -> None:
        self.is_closed = True

    def _suffer(self) -> None:
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)  # a slow store is what is asked for
        if self.fails is not None:
            raise self.fails
