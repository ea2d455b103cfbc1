"""Windows: where rank 0 reads and writes the pages of a rank whose memory is a device's, or that of
another machine.

A window is memory of the host with room for one page, which rank 0 maps. It asks the rank, by a
socket of their own, to bring a page there or to put away what lies there. A thread of the rank does
it, in the order of the stream that its steps run on, whatever the thread that takes plans is at.
Between machines both have such memory, and its bytes go with what is asked and answered.
"""

import mmap
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np
import zmq

from banyan.base.ids import PageId
from banyan.base.log import logger
from banyan.base.os import anonymous_memory
from banyan.runner.kvstore import KVStore

log = logger(__name__)

_BRING, _PUT = 1, 2
_ASKED = struct.Struct("<BIQ")
"""What to do, the group, the page."""
_DONE, _FAILED = b"\0", b"\1"
_LOOK_MS = 100
"""How often whoever waits for another machine looks whether that lives."""


class Window:
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


class Desk(Protocol):
    """A window, from rank 0."""

    def ask(self, is_put: bool, group: int, page: PageId) -> None: ...
    def wait(self) -> None: ...


class FarWindow:
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


class DistantWindow:
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
