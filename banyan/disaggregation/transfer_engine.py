"""TransferEngine: writes pages into the memory of another server.

A decode server receives pages in landing slots, memory used for nothing else, because a transfer
engine lets anyone who reaches it write there. So a slot's bytes are copied out first, and are used
only if they match the code that came over the authenticated connection.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Thread
from typing import Any, Protocol

import msgspec
import numpy as np

LANDING_BYTES = 64 << 20
"""Bytes of landing memory; at least one batch of pages."""
BATCH = 16
"""Most pages in one write."""
CODE_BYTES = 16


class Landing(msgspec.Struct, frozen=True):
    """Where a server receives pages.

    Attributes:
        address: of its engine.
        base, size_bytes: of its landing memory.
    """

    address: bytes
    base: int
    size_bytes: int


class TransferMemory(Protocol):
    """Memory that an engine reads or writes: the host's, or a device's."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def read(self, at: int, size_bytes: int) -> np.ndarray:
        """A copy, which the engine cannot write to."""
        ...

    def write(self, at: int, payload: np.ndarray) -> None: ...


class HostMemory:
    """Satisfies TransferMemory. Zeros at first."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.zeros(size_bytes, np.uint8)
        self.address, self.size_bytes = self._bytes.ctypes.data, size_bytes

    def read(self, at: int, size_bytes: int) -> np.ndarray:
        return self._bytes[at : at + size_bytes].copy()

    def write(self, at: int, payload: np.ndarray) -> None:
        self._bytes[at : at + len(payload)] = payload


@dataclass(frozen=True)
class Fabric:
    """Direct copies from device to device.

    Attributes:
        library: the engine's module.
        device: number of this replica's device.
        protocol: the library's name of the way it copies.
        store: URL of the store at which engines find each other; "" = not set.
        allocate: allocates at least that many bytes of device memory.
    """

    library: Any
    device: int
    protocol: str
    store: str
    allocate: Callable[[int], TransferMemory]


class TransferEngine(Protocol):
    """Writes pages into the memory of another server. OSError if it fails."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    def land(self, size_bytes: int) -> tuple[bytes, TransferMemory]:
        """Allocate memory that others may write to from now on; returns it with the engine's
        address."""
        ...

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write pages, each at its offset from the base, and wait until all are written. Called
        from several threads."""
        ...


def code_of(page: np.ndarray, key: bytes, number: int) -> bytes:
    """Code that proves that a page is complete and who sent it. `key` is known to both ends of one
    connection; `number` is the page's index among the wanted pages."""
    made = blake2b(key=key, digest_size=CODE_BYTES, person=b"page", salt=number.to_bytes(8, "big"))
    made.update(page.data)
    return made.digest()


@dataclass
class LandingSlots:
    """Landing memory, cut into slots of one size. Belongs to one event loop."""

    engine: TransferEngine
    memory: TransferMemory
    page_bytes: int
    """Size of the longest page."""
    landing: Landing
    free: list[int]
    returned: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, most: int) -> list[int]:
        """Take up to `most` slots; waits until at least one is free."""
        while not self.free:
            self.returned.clear()
            await self.returned.wait()
        count = min(most, BATCH, len(self.free))
        return [self.free.pop() for _ in range(count)]

    def release(self, slots: Sequence[int]) -> None:
        """Free slots. A late write damages only other pages, whose codes then do not match."""
        self.free.extend(slots)
        self.returned.set()

    def offset(self, slot: int) -> int:
        return slot * self.page_bytes

    def read(self, slot: int, size_bytes: int) -> np.ndarray:
        """A copy, which the engine cannot write to."""
        return self.memory.read(self.offset(slot), size_bytes)


def open_slots(engine: TransferEngine, page_bytes: int) -> LandingSlots:
    """Allocate landing memory. page_bytes: of the longest page."""
    count = max(BATCH, LANDING_BYTES // page_bytes)
    address, memory = engine.land(count * page_bytes)
    landing = Landing(address, memory.address, memory.size_bytes)
    return LandingSlots(engine, memory, page_bytes, landing, list(reversed(range(count))))


def write_in_thread(
    engine: TransferEngine, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]
) -> "asyncio.Future[None]":
    """Write in a separate thread, so that an engine that hangs blocks neither the loop nor exit."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def write() -> None:
        try:
            engine.write(landing, pages)
        except Exception as error:  # re-raised where the future is awaited
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=write, name="transfer engine", daemon=True).start()
    return asyncio.wrap_future(done)
