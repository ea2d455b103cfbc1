"""Windows: where rank 0 reads and writes the pages of a rank whose memory is a device's.

A window is memory of the host with room for one page, which rank 0 maps. It asks the rank, by a
socket of their own, to bring a page there or to put away what lies there. A thread of the rank does
it, in the order of the stream that its steps run on, whatever the thread that takes plans is at.
"""

import mmap
import os
import socket
import struct
import threading
from contextlib import suppress
from typing import Protocol

import numpy as np

from banyan.base.ids import PageId
from banyan.base.log import logger
from banyan.runner.kvstore import KVStore

log = logger(__name__)

_BRING, _PUT = 1, 2
_ASKED = struct.Struct("<BIQ")
"""What to do, the group, the page."""
_DONE, _FAILED = b"\0", b"\1"


class Window:
    """
    Attributes:
        file: what rank 0 maps.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        size = max(store.page_bytes(group) for group in range(len(store.groups)))
        self.file = os.memfd_create("banyan-window", os.MFD_CLOEXEC)
        os.ftruncate(self.file, max(size, 1))
        self._bytes = np.frombuffer(mmap.mmap(self.file, max(size, 1)), np.uint8)

    def ask(self, is_put: bool, group: int, page: PageId) -> None:
        """Bring a page here, or put it away."""
        if is_put:
            size = self._store.page_bytes(group)
            self._store.put(group, page, self._bytes[:size])
            return
        with self._store.stream():
            payload = self._store.take(group, page)
        self._bytes[: len(payload)] = payload

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
                what, group, page = _ASKED.unpack(asked)
                try:
                    self.ask(what == _PUT, group, page)
                except Exception:
                    log.exception("page %d of group %d cannot be moved", page, group)
                    rank_0.send(_FAILED)
                else:
                    rank_0.send(_DONE)


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
