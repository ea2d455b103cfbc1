"""TransferEngine: writes pages into the memory of another server.

A server that takes lands pages in slots of memory that it keeps for them, and for nothing else: a
transfer engine lets whoever reaches it write there. So a slot's bytes are copied out of it first,
and count only if the code that came over the room's own connection is theirs.
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
"""Bytes of memory that pages land in; at least one batch of them."""
BATCH = 16
"""Pages that travel together."""
CODE_BYTES = 16


class Landing(msgspec.Struct, frozen=True):
    """Where a server takes pages.

    Attributes:
        address: what its engine calls itself.
        base, size_bytes: of the memory.
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
        """A copy, which nobody else can write to."""
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
    """What copies from device to device, for engines that do.

    Attributes:
        library: the engine's module.
        device: number of this replica's device.
        protocol: how it copies, as the library calls it.
        store: URL of the store at which engines meet; "" = none is named.
        allocate: memory of the device, of at least that many bytes.
    """

    library: Any
    device: int
    protocol: str
    store: str
    allocate: Callable[[int], TransferMemory]


class TransferEngine(Protocol):
    """A transfer engine. OSError when it cannot do what it is asked for."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def land(self, size_bytes: int) -> tuple[bytes, TransferMemory]:
        """The engine's address, and memory that others may write to from now on."""
        ...

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write pages, each at its distance from the base, and wait until all are there. Called
        from several threads."""
        ...


def code_of(page: np.ndarray, key: bytes, number: int) -> bytes:
    """What tells that a page came whole, and from whom: `key` is known to both ends of one
    connection, and `number` is the page's place in what it carries."""
    made = blake2b(key=key, digest_size=CODE_BYTES, person=b"page", salt=number.to_bytes(8, "big"))
    made.update(page.data)
    return made.digest()


@dataclass
class LandingSlots:
    """Memory that pages land in, cut into slots of one size. Belongs to one event loop."""

    engine: TransferEngine
    memory: TransferMemory
    page_bytes: int
    """Of the longest page."""
    landing: Landing
    free: list[int]
    returned: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, most: int) -> list[int]:
        """Some slots, at least one."""
        while not self.free:
            self.returned.clear()
            await self.returned.wait()
        count = min(most, BATCH, len(self.free))
        return [self.free.pop() for _ in range(count)]

    def release(self, slots: Sequence[int]) -> None:
        """A write that comes later falls on other pages, whose codes tell."""
        self.free.extend(slots)
        self.returned.set()

    def offset(self, slot: int) -> int:
        return slot * self.page_bytes

    def read(self, slot: int, size_bytes: int) -> np.ndarray:
        """A copy, which nobody else can write to."""
        return self.memory.read(self.offset(slot), size_bytes)


def open_slots(engine: TransferEngine, page_bytes: int) -> LandingSlots:
    """
    Args:
        page_bytes: of the longest page.
    """
    count = max(BATCH, LANDING_BYTES // page_bytes)
    address, memory = engine.land(count * page_bytes)
    landing = Landing(address, memory.address, memory.size_bytes)
    return LandingSlots(engine, memory, page_bytes, landing, list(reversed(range(count))))


def write_in_thread(
    engine: TransferEngine, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]
) -> "asyncio.Future[None]":
    """Write in a thread of its own: an engine that hangs holds up nobody else, and no exit."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def write() -> None:
        try:
            engine.write(landing, pages)
        except Exception as error:  # told by whoever waits
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=write, name="carrier", daemon=True).start()
    return asyncio.wrap_future(done)
