"""RankAccess: how rank 0 reads and writes the KV pages of the other ranks of its replica.

A rank on the same machine publishes its pages in a file (`LocalRankAccess`). Rank 0 maps them;
pages on a device are reached through a window, one page of host memory. A rank on another machine
is reached over an encrypted connection (`RemoteRankAccess`), one page at a time. Only ranks that
were sent the connection's key can connect.
"""

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
import zmq

from banyan.base.errors import DeviceError
from banyan.base.ids import PageId
from banyan.base.log import logger
from banyan.base.os import anonymous_memory
from banyan.runner.kvstore import KVStore
from banyan.runner.page_layout import PageLayout, page_layouts_of, window_layouts

log = logger(__name__)

_BRING, _PUT = 1, 2
_ASKED = struct.Struct("<BIQ")
"""What to do, the group, the page."""
_DONE, _FAILED = b"\0", b"\1"
_LOOK_MS = 100
"""How often whoever waits for another machine looks whether that lives."""


class PageWindow:
    """
    Attributes:
        file: what rank 0 maps.
        memory: the same, uint8.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        size = max(store.page_bytes(group) for group in range(len(store.groups)))
        self.file = anonymous_memory("banyan-window", max(size, 1))
        self.memory = np.frombuffer(mmap.mmap(self.file, max(size, 1)), np.uint8)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        """Bring a page here, or put it away."""
        if is_put:
            size = self._store.page_bytes(group)
            self._store.put(group, page, self.memory[:size])
            return
        with self._store.stream():
            payload = self._store.take(group, page)
        self.memory[: len(payload)] = payload

    def wait(self) -> None:
        """It is done when `ask` returns."""

    def serve(self, door: str) -> None:
        """Do what rank 0 asks for at `door`, in a thread of its own, until it goes."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(door)
        listener.listen(1)
        threading.Thread(target=self._serve, args=(listener,), name="window", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            rank_0, _ = listener.accept()
        with rank_0, suppress(ConnectionError):  # rank 0 waits no more, and tells why
            while asked := rank_0.recv(_ASKED.size):
                rank_0.send(self._answer(*_ASKED.unpack(asked)))

    def serve_afar(self, rank_0: "zmq.Socket[bytes]") -> None:
        """Do what rank 0 of another machine asks for, for as long as this process lives."""
        while True:
            asked, *parts = rank_0.recv_multipart()
            what, group, page = _ASKED.unpack(asked)
            if what == _PUT:
                self.memory[: len(parts[0])] = np.frombuffer(parts[0], np.uint8)
            answer = self._answer(what, group, page)
            size = self._store.page_bytes(group) if what == _BRING and answer == _DONE else 0
            rank_0.send_multipart([answer, self.memory[:size].tobytes()])

    def _answer(self, what: int, group: int, page: int) -> bytes:
        try:
            self.ask(what == _PUT, group, PageId(page))
        except Exception:
            log.exception("page %d of group %d cannot be moved", page, group)
            return _FAILED
        return _DONE


class WindowClient(Protocol):
    """A window, from rank 0."""

    def ask(self, is_put: bool, group: int, page: PageId) -> None: ...
    def wait(self) -> None: ...


class LocalWindowClient:
    """Another rank's, at `door`. OSError when the rank has gone, or cannot.

    One whose answer does not come in time is not asked again: what it then does is about a page
    that nobody means any more.
    """

    def __init__(self, door: str, timeout_s: float) -> None:
        self._rank = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._rank.settimeout(timeout_s)
        self._rank.connect(door)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        self._rank.send(_ASKED.pack(_PUT if is_put else _BRING, group, page))

    def wait(self) -> None:
        try:
            answer = self._rank.recv(1)
        except TimeoutError:
            self._rank.close()
            raise
        if answer != _DONE:
            what = "cannot move a page of its device" if answer else "has gone"
            raise OSError(f"another rank of this server {what}")


class RemoteWindowClient:
    """That of a rank of another machine. OSError when the rank has gone, or cannot.

    Args:
        is_lost: whether ranks of other machines are known to be gone; asked while one is waited
            for, whose end nothing else tells.
    """

    def __init__(
        self, rank: "zmq.Socket[bytes]", timeout_s: float, is_lost: Callable[[], bool]
    ) -> None:
        self._rank, self._timeout_s, self._is_lost = rank, timeout_s, is_lost
        self._sizes: Mapping[int, int] = {}
        self._asked = 0
        """Bytes that the answer brings."""
        self.memory = np.empty(0, np.uint8)

    def hold(self, sizes: Mapping[int, int]) -> None:
        """Make room for a page of any group: group -> bytes."""
        self._sizes = sizes
        self.memory = np.zeros(max(sizes.values(), default=0), np.uint8)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        size = self._sizes.get(group, 0)
        asked = _ASKED.pack(_PUT if is_put else _BRING, group, page)
        payload = [self.memory[:size].tobytes()] if is_put else []
        self._asked = 0 if is_put else size
        try:
            self._rank.send_multipart([asked, *payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # nobody is there, or it was closed
            raise OSError(f"another rank of this server has gone: {error}") from None

    def wait(self) -> None:
        answer, payload = self._hear()
        if answer != _DONE:
            raise OSError("another rank of this server cannot move a page of its device")
        if len(payload) != self._asked:
            raise OSError(
                f"another rank of this server says {len(payload):,} bytes, not {self._asked:,}"
            )
        self.memory[: len(payload)] = np.frombuffer(payload, np.uint8)

    def hear(self) -> bytes:
        """What the rank says first."""
        (said,) = self._hear()
        return said

    def _hear(self) -> list[bytes]:
        until = time.monotonic() + self._timeout_s
        while not self._rank.poll(_LOOK_MS):
            is_lost = self._is_lost()
            if is_lost or time.monotonic() >= until:
                self._rank.close()  # what it may still say is about a page that nobody means
                if is_lost:
                    raise OSError("another rank of this server has gone")
                raise TimeoutError(f"another rank of this server is silent for {self._timeout_s} s")
        return self._rank.recv_multipart()


_LOOK_S = 0.005
_MAX_SAID_BYTES = 1 << 30
"""Of what a rank of another machine says at once: a page."""


class PagesAnnouncement(msgspec.Struct, frozen=True):
    """What rank 0 is told of another rank's pages.

    Attributes:
        door: where pages are brought to the file, one at a time; "" = all of them lie in it.
    """

    pid: int
    file: int
    page_layouts: list[PageLayout]
    door: str = ""


@dataclass(frozen=True)
class Pages:
    """What rank 0 has of one rank's pages.

    Attributes:
        memory: where the shelves lie, uint8.
        desk: what brings a page there, one at a time; None = all of them lie there.
    """

    page_layouts: list[PageLayout]
    memory: np.ndarray
    window: WindowClient | None = None


class RankAccess(Protocol):
    """The way to another rank's pages."""

    def open(self, timeout_s: float) -> Pages:
        """Wait until the rank has told of them; DeviceError when it does not come."""
        ...


def own_rank_pages(store: KVStore) -> Pages:
    """Of rank 0 itself."""
    page_layouts = page_layouts_of(store)
    if store.is_host:
        return Pages(page_layouts, _mapped(os.getpid(), store.file, page_layouts))
    window = PageWindow(store)
    return Pages(window_layouts(page_layouts), window.memory, window)


class LocalRankAccess:
    """Of a rank of this machine, which leaves word at `link`."""

    def __init__(self, link: str) -> None:
        self._link = link

    def open(self, timeout_s: float) -> Pages:
        told = self._hear(timeout_s)
        memory = _mapped(told.pid, told.file, told.page_layouts)
        return Pages(
            told.page_layouts,
            memory,
            LocalWindowClient(told.door, timeout_s) if told.door else None,
        )

    def _hear(self, timeout_s: float) -> PagesAnnouncement:
        until = time.monotonic() + timeout_s
        while True:
            try:
                with open(self._link, "rb") as file:
                    return msgspec.json.decode(file.read(), type=PagesAnnouncement)
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise _silent(f"at {self._link}", timeout_s) from None
            time.sleep(_LOOK_S)


@dataclass(frozen=True)
class RankAddress:
    """Where rank 0 waits for a rank of another machine. Who knows the key may connect.

    Attributes:
        address: of ZeroMQ.
        key: public key of rank 0, Z85.
    """

    address: str
    key: str = field(repr=False)


class RemoteRankAccess:
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
        self.place = RankAddress(f"tcp://{address}:{port}", public.decode())

    def open(self, timeout_s: float) -> Pages:
        window = RemoteWindowClient(self._socket, timeout_s, self._is_lost)
        try:
            page_layouts = msgspec.json.decode(window.hear(), type=list[PageLayout])
        except TimeoutError:
            raise _silent("from another machine", timeout_s) from None
        except OSError as error:
            raise DeviceError(str(error)) from None
        sizes: dict[int, int] = {}
        for page_layout in page_layouts:
            sizes[page_layout.group] = sizes.get(page_layout.group, 0) + page_layout.page_bytes
        window.hold(sizes)
        return Pages(page_layouts, window.memory, window)


def publish_pages(store: KVStore, link: str) -> None:
    """On another rank of the machine: leave word of its pages at `link`."""
    told = PagesAnnouncement(os.getpid(), store.file, page_layouts_of(store))
    if not store.is_host:
        window, door = PageWindow(store), f"{link}.door"
        window.serve(door)
        told = PagesAnnouncement(os.getpid(), window.file, window_layouts(told.page_layouts), door)
    draft = f"{link}.new"
    with open(draft, "wb") as out:
        out.write(msgspec.json.encode(told))
    os.rename(draft, link)


def publish_pages_remotely(store: KVStore, place: RankAddress) -> None:
    """On a rank of another machine: tell it there, and do what it asks for from then on."""
    window = PageWindow(store)
    rank_0 = zmq.Context.instance().socket(zmq.DEALER)
    rank_0.setsockopt(zmq.LINGER, 0)
    rank_0.curve_publickey, rank_0.curve_secretkey = zmq.curve_keypair()
    rank_0.curve_serverkey = place.key.encode()
    rank_0.connect(place.address)
    rank_0.send(msgspec.json.encode(window_layouts(page_layouts_of(store))))
    threading.Thread(
        target=window.serve_afar, args=(rank_0,), name="distant window", daemon=True
    ).start()


def pages_file_of(address: str) -> str:
    """Where a rank of this machine leaves word of its pages.

    Args:
        address: where it gets its plans, ipc://…
    """
    return f"{urlsplit(address).path}.pages"


def rank_addresses_of(rank_access: Sequence[RankAccess]) -> dict[int, RankAddress]:
    """Where the ranks of other machines come to, by rank."""
    return {
        rank: door.place
        for rank, door in enumerate(rank_access, 1)
        if isinstance(door, RemoteRankAccess)
    }


def _mapped(pid: int, descriptor: int, page_layouts: Sequence[PageLayout]) -> np.ndarray:
    if not page_layouts:
        return np.empty(0, np.uint8)
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError(f"the pages of another rank cannot be mapped: {error}") from None
    with os.fdopen(file, "r+b"):
        return np.frombuffer(mmap.mmap(file, 0), np.uint8)


def _silent(where: str, timeout_s: float) -> DeviceError:
    return DeviceError(f"a rank said nothing of its pages {where} within {timeout_s:g} s")
