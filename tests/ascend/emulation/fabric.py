"""MemFabric's transfer engine, emulated: the calls of the package, the bytes over the loopback. The
store is the package's own.

Memory of an emulated NPU is the host's, so an address is where the bytes are. What the engine
refuses gives -1, as there: memory that is not registered, on either side, and a peer that is not
there.
"""

import ctypes
import enum
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import SupportsInt
from urllib.parse import urlsplit

BLOCK_BYTES = 2 << 20
"""What registrations are made of."""
_OK, _REFUSED = 0, -1
_COUNT, _RANGE, _STATUS = struct.Struct("<I"), struct.Struct("<QQ"), struct.Struct("<i")
_MOST_RANGES = 1 << 12
_TIMEOUT_S = 20.0


class TransDataOpType(enum.Enum):
    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 8
    DEVICE_URMA = 64
    DEVICE_UBOE = 128


BY_CHIP = {"A2": TransDataOpType.DEVICE_RDMA, "A3": TransDataOpType.SDMA}


def create_config_store(store_url: str) -> int:
    return import_module("memfabric_hybrid").create_config_store(store_url=store_url)


class TransferEngine:
    """
    Attributes:
        landed: called with each address that another engine has written to.
    """

    def __init__(self) -> None:
        self.landed: Callable[[int], None] = lambda address: None
        self.role = ""
        self._ranges: list[tuple[int, int]] = []
        self._listener: socket.socket | None = None
        self._port = 0

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: SupportsInt,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        url = urlsplit(store_url)
        host = session_id.rpartition(":")[0]
        if role not in ("Prefill", "Decode") or url.scheme != "tcp":
            return _REFUSED
        if data_op_type not in BY_CHIP.values():
            return _REFUSED
        try:
            socket.create_connection((url.hostname, url.port), _TIMEOUT_S).close()
            self._listener = socket.create_server((host, 0))
        except OSError:
            return _REFUSED
        self.role = role
        self._port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return _OK

    def get_rpc_port(self) -> int:
        """0 before `initialize`, as the package says it."""
        return self._port

    def register_memory(self, buffer_addr: SupportsInt, capacity: SupportsInt) -> int:
        return self.batch_register_memory([buffer_addr], [capacity])

    def batch_register_memory(
        self, buffer_addrs: Sequence[SupportsInt], capacities: Sequence[SupportsInt]
    ) -> int:
        """Ranges that share a block with one of an earlier call are refused: neighbours are merged
        within a call only."""
        new = [(int(at), int(size)) for at, size in zip(buffer_addrs, capacities, strict=True)]
        for at, size in new:
            for other, other_size in self._ranges:
                if _first(at) <= _last(other, other_size) and _first(other) <= _last(at, size):
                    return _REFUSED
        self._ranges += new
        return _OK

    def unregister_memory(self, buffer_addr: SupportsInt) -> int:
        self._ranges = [each for each in self._ranges if each[0] != int(buffer_addr)]
        return _OK

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: Sequence[SupportsInt],
        peer_buffers: Sequence[SupportsInt],
        lengths: Sequence[SupportsInt],
        flags: SupportsInt = 0,
    ) -> int:
        sources = [(int(at), int(size)) for at, size in zip(buffers, lengths, strict=True)]
        targets = [(int(at), int(size)) for at, size in zip(peer_buffers, lengths, strict=True)]
        if len(sources) > _MOST_RANGES or not all(self._has(*each) for each in sources):
            return _REFUSED
        host, _, port = dest_session.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), _TIMEOUT_S) as peer:
                peer.sendall(_COUNT.pack(len(targets)))
                peer.sendall(b"".join(_RANGE.pack(*each) for each in targets))
                for at, size in sources:
                    peer.sendall(_bytes_at(at, size))
                return int(_STATUS.unpack(_exactly(peer, _STATUS.size))[0])
        except (OSError, EOFError, ValueError):
            return _REFUSED

    def destroy(self) -> None:
        if self._listener is not None:
            self._listener.close()

    unInitialize = destroy  # noqa: N815: the package's name

    def _has(self, at: int, size: int) -> bool:
        return any(start <= at and at + size <= start + whole for start, whole in self._ranges)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(peer,), daemon=True).start()

    def _take(self, peer: socket.socket) -> None:
        """What another engine writes."""
        with peer, suppress(OSError, EOFError):
            peer.settimeout(_TIMEOUT_S)
            (count,) = _COUNT.unpack(_exactly(peer, _COUNT.size))
            if count > _MOST_RANGES:
                return
            targets = list(_RANGE.iter_unpack(_exactly(peer, count * _RANGE.size)))
            if not all(self._has(*each) for each in targets):
                peer.sendall(_STATUS.pack(_REFUSED))
                return
            for at, size in targets:
                _fill(peer, _bytes_at(at, size))
                self.landed(at)
            peer.sendall(_STATUS.pack(_OK))


def _first(at: int) -> int:
    return at // BLOCK_BYTES


def _last(at: int, size: int) -> int:
    return (at + size - 1) // BLOCK_BYTES


def _bytes_at(at: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(at)).cast("B")


def _exactly(peer: socket.socket, size: int) -> bytes:
    got = bytearray(size)
    _fill(peer, memoryview(got))
    return bytes(got)


def _fill(peer: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = peer.recv_into(into[at:])
        if not count:
            raise EOFError
        at += count
