"""Doors: how rank 0 comes to the pages of the other ranks of a replica.

A rank of the same machine leaves word in a file (`Linked`): rank 0 maps its pages, or a window of
them where they lie on a device. One of another machine is asked over the network (`Far`), for one
page at a time; the connection is encrypted, and lets in who was told its key, as ranks are over the
connections of their nodes.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import zmq

from banyan.base.errors import DeviceError
from banyan.runner.kvstore import KVStore
from banyan.runner.page_layout import Shelf, in_window, shelves_of
from banyan.runner.rank_windows import Desk, DistantWindow, FarWindow, Window

_LOOK_S = 0.005
_MAX_SAID_BYTES = 1 << 30
"""Of what a rank of another machine says at once: a page."""


class Shelves(msgspec.Struct, frozen=True):
    """What rank 0 is told of another rank's pages.

    Attributes:
        door: where pages are brought to the file, one at a time; "" = all of them lie in it.
    """

    pid: int
    file: int
    shelves: list[Shelf]
    door: str = ""


@dataclass(frozen=True)
class Pages:
    """What rank 0 has of one rank's pages.

    Attributes:
        memory: where the shelves lie, uint8.
        desk: what brings a page there, one at a time; None = all of them lie there.
    """

    shelves: list[Shelf]
    memory: np.ndarray
    desk: Desk | None = None


class Door(Protocol):
    """The way to another rank's pages."""

    def open(self, timeout_s: float) -> Pages:
        """Wait until the rank has told of them; DeviceError when it does not come."""
        ...


def own_pages(store: KVStore) -> Pages:
    """Of rank 0 itself."""
    shelves = shelves_of(store)
    if store.is_host:
        return Pages(shelves, _mapped(os.getpid(), store.file, shelves))
    window = Window(store)
    return Pages(in_window(shelves), window.memory, window)


class Linked:
    """Of a rank of this machine, which leaves word at `link`."""

    def __init__(self, link: str) -> None:
        self._link = link

    def open(self, timeout_s: float) -> Pages:
        told = self._hear(timeout_s)
        memory = _mapped(told.pid, told.file, told.shelves)
        return Pages(told.shelves, memory, FarWindow(told.door, timeout_s) if told.door else None)

    def _hear(self, timeout_s: float) -> Shelves:
        until = time.monotonic() + timeout_s
        while True:
            try:
                with open(self._link, "rb") as file:
                    return msgspec.json.decode(file.read(), type=Shelves)
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise _silent(f"at {self._link}", timeout_s) from None
            time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Place:
    """Where rank 0 waits for a rank of another machine. Who knows the key may connect.

    Attributes:
        address: of ZeroMQ.
        key: public key of rank 0, Z85.
    """

    address: str
    key: str = field(repr=False)


class Far:
    """Of a rank of another machine, which comes to a port of its own here.

    Args:
        host: the address of this machine that the others know.
        is_lost: whether they are known to be gone; asked while one is waited for.
    """

    def __init__(self, host: str, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SAID_BYTES)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_publickey, self._socket.curve_server = public, True
        address = socket.gethostbyname(host)
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self.place = Place(f"tcp://{address}:{port}", public.decode())

    def open(self, timeout_s: float) -> Pages:
        window = DistantWindow(self._socket, timeout_s, self._is_lost)
        try:
            shelves = msgspec.json.decode(window.hear(), type=list[Shelf])
        except TimeoutError:
            raise _silent("from another machine", timeout_s) from None
        except OSError as error:
            raise DeviceError(str(error)) from None
        sizes: dict[int, int] = {}
        for shelf in shelves:
            sizes[shelf.group] = sizes.get(shelf.group, 0) + shelf.page_bytes
        window.hold(sizes)
        return Pages(shelves, window.memory, window)


def tell_rank_0(store: KVStore, link: str) -> None:
    """On another rank of the machine: leave word of its pages at `link`."""
    told = Shelves(os.getpid(), store.file, shelves_of(store))
    if not store.is_host:
        window, door = Window(store), f"{link}.door"
        window.serve(door)
        told = Shelves(os.getpid(), window.file, in_window(told.shelves), door)
    draft = f"{link}.new"
    with open(draft, "wb") as out:
        out.write(msgspec.json.encode(told))
    os.rename(draft, link)


def tell_rank_0_afar(store: KVStore, place: Place) -> None:
    """On a rank of another machine: tell it there, and do what it asks for from then on."""
    window = Window(store)
    rank_0 = zmq.Context.instance().socket(zmq.DEALER)
    rank_0.setsockopt(zmq.LINGER, 0)
    rank_0.curve_publickey, rank_0.curve_secretkey = zmq.curve_keypair()
    rank_0.curve_serverkey = place.key.encode()
    rank_0.connect(place.address)
    rank_0.send(msgspec.json.encode(in_window(shelves_of(store))))
    threading.Thread(
        target=window.serve_afar, args=(rank_0,), name="distant window", daemon=True
    ).start()


def link_of(address: str) -> str:
    """Where a rank of this machine leaves word of its pages.

    Args:
        address: where it gets its plans, ipc://…
    """
    return f"{urlsplit(address).path}.pages"


def places_of(doors: Sequence[Door]) -> dict[int, Place]:
    """Where the ranks of other machines come to, by rank."""
    return {rank: door.place for rank, door in enumerate(doors, 1) if isinstance(door, Far)}


def _mapped(pid: int, descriptor: int, shelves: Sequence[Shelf]) -> np.ndarray:
    if not shelves:
        return np.empty(0, np.uint8)
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError(f"the pages of another rank cannot be mapped: {error}") from None
    with os.fdopen(file, "r+b"):
        return np.frombuffer(mmap.mmap(file, 0), np.uint8)


def _silent(where: str, timeout_s: float) -> DeviceError:
    return DeviceError(f"a rank said nothing of its pages {where} within {timeout_s:g} s")
