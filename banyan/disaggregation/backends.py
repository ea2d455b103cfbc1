"""The transfer backends of --disaggregation-transfer-backend.

    tcp        plain connections, nothing to install
    mooncake   Mooncake's transfer engine writes pages over TCP, or over RDMA by the devices of
               --disaggregation-ib-device
    nixl       a NIXL agent writes pages over UCX, which chooses the transport between two servers;
               UCX_TLS, UCX_NET_DEVICES and --disaggregation-ib-device restrict it
    fake       the other server does not exist; for load tests of one side alone

mooncake and nixl use the connections of tcp for control. The engines of Mooncake find each other by
themselves (P2PHANDSHAKE), without a metadata server. They listen on every interface and have no
authentication; they expose only the landing slots.
"""

import socket
import time
import uuid
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import logger
from banyan.base.os import is_loopback
from banyan.disaggregation.decode_side import DecodeSide
from banyan.disaggregation.prefill_side import PrefillSide
from banyan.disaggregation.transfer import End, EndedTransfers, OpenEngine, TransferOptions
from banyan.disaggregation.transfer_engine import HostMemory, Landing
from banyan.kv_transfer.page_mover import PageMover, Pages
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    KVTransferOp,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFound,
)
from banyan.messages.plan import (
    CopyResult,
    Lookup,
    PageCopy,
    is_fake_transfer,
    transfer_position,
)

log = logger(__name__)

_ANYWHERE = ("0.0.0.0", "::", "")


def open_tcp(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> PageMover:
    """ConfigError if a prefill server cannot listen."""
    kind = PrefillSide if options.is_prefill else DecodeSide
    return kind(pages, options, wake)


def open_with_engine(
    open_engine: OpenEngine, pages: Pages, options: TransferOptions, wake: Callable[[], None]
) -> PageMover:
    """A mover whose pages are written by a transfer engine."""
    host = options.host
    if host in _ANYWHERE:
        host = socket.gethostbyname(socket.gethostname())
    engine = open_engine(host, options)
    if not options.is_prefill:
        log.warning(
            "%s lets anyone who reaches its ports at %s write to, and read, the memory that pages "
            "land in%s; pages are checked, and not encrypted",
            engine.name,
            host,
            " (other users of this machine too)" * is_loopback(host),
        )
    kind = PrefillSide if options.is_prefill else DecodeSide
    return kind(pages, options, wake, engine)


class Mooncake:
    """Satisfies TransferEngine.

    Raises:
        ConfigError: the package is not there, or its engine does not start.
    """

    name = "mooncake"

    def __init__(self, host: str, options: TransferOptions) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend mooncake: its engine does not load: {error}",
                hint=f"run: {install_command('mooncake')} (on Debian and Ubuntu also: apt install "
                "libibverbs1)",
            ) from None
        self._engine = TransferEngine()
        protocol = "rdma" if options.rdma_devices else "tcp"
        if status := self._engine.initialize(host, "P2PHANDSHAKE", protocol, options.rdma_devices):
            where = f"{host} over {protocol} {options.rdma_devices}".rstrip()
            raise ConfigError(
                f"--disaggregation-transfer-backend mooncake: its engine does not start at {where} "
                f"(status {status})",
                hint="name an address of this machine with --host, and devices that are up",
            )
        self._address = f"{host}:{self._engine.get_rpc_port()}".encode()

    def land(self, size_bytes: int) -> tuple[bytes, HostMemory]:
        memory = HostMemory(size_bytes)
        if status := self._engine.register_memory(memory.address, size_bytes):
            raise OSError(f"mooncake does not take {size_bytes:,} bytes (status {status})")
        return self._address, memory

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        sources = [page.ctypes.data for _, page in pages]
        targets = [landing.base + offset for offset, _ in pages]
        sizes = [page.nbytes for _, page in pages]
        peer = landing.address.decode()
        if status := self._engine.batch_transfer_sync_write(peer, sources, targets, sizes):
            raise OSError(f"mooncake cannot write to {peer} (status {status})")


def open_mooncake(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> PageMover:
    return open_with_engine(Mooncake, pages, options, wake)


_PACKAGES = "nixl nixl-cu12"
_MOST_PEERS = 256
_POLL_S = 0.0002
_TIMEOUT_S = 30.0
_MEMORY = "DRAM"


class Nixl:
    """Satisfies TransferEngine. One call of the agent at a time; writes of several threads overlap.

    Raises:
        ConfigError: the package is not there, or its agent does not start.
    """

    name = "nixl"

    def __init__(self, host: str, options: TransferOptions) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend nixl: it does not load: {error}",
                hint=f"run: pip install --no-deps {_PACKAGES}",
            ) from None
        try:
            self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=[]))
            devices = {"device_list": options.rdma_devices} if options.rdma_devices else {}
            self._agent.create_backend("UCX", devices)
        except Exception as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend nixl: its agent does not start: {error}",
                hint="look at UCX_TLS and UCX_NET_DEVICES, or use tcp",
            ) from None
        self._peers: dict[bytes, str] = {}
        """Agent names by address, oldest first."""
        self._lock = Lock()

    def land(self, size_bytes: int) -> tuple[bytes, HostMemory]:
        memory = HostMemory(size_bytes)
        try:
            self._agent.register_memory([(memory.address, size_bytes, 0, "")], _MEMORY)
            return self._agent.get_agent_metadata(), memory
        except Exception as error:
            raise OSError(f"nixl does not take {size_bytes:,} bytes: {error}") from None

    def write(self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]]) -> None:
        together = np.concatenate([page for _, page in pages])
        try:
            self._write(landing, pages, together)
        except Exception as error:
            with self._lock:
                self._forget(landing.address)
            raise OSError(f"nixl cannot write: {error or type(error).__name__}") from None

    def _write(
        self, landing: Landing, pages: Sequence[tuple[int, np.ndarray]], together: np.ndarray
    ) -> None:
        agent, base = self._agent, together.ctypes.data
        sources, targets, at = list[tuple[int, int, int]](), list[tuple[int, int, int]](), 0
        for offset, page in pages:
            sources.append((base + at, page.nbytes, 0))
            targets.append((landing.base + offset, page.nbytes, 0))
            at += page.nbytes
        with self._lock:
            peer = self._meet(landing.address)
            held = agent.register_memory([(base, together.nbytes, 0, "")], _MEMORY)
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(sources, _MEMORY),
                agent.get_xfer_descs(targets, _MEMORY),
                peer,
            )
            state = agent.transfer(handle)
        until = time.monotonic() + _TIMEOUT_S
        try:
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                agent.release_xfer_handle(handle)
                agent.deregister_memory(held)
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")

    def _meet(self, address: bytes) -> str:
        if address not in self._peers:
            if len(self._peers) >= _MOST_PEERS:
                self._forget(next(iter(self._peers)))
            name = self._agent.add_remote_agent(address)
            self._peers[address] = name.decode() if isinstance(name, bytes) else name
        return self._peers[address]

    def _forget(self, address: bytes) -> None:
        name = self._peers.pop(address, None)
        if name is not None:
            self._agent.remove_remote_agent(name)


def open_nixl(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> PageMover:
    return open_with_engine(Nixl, pages, options, wake)


_FIRST = bytes(4)


class FakeTransfer:
    """Satisfies PageMover without another server.

    A prefill server discards its pages. A decode server keeps whatever its pages contain and gets a
    first token that no model chose: its answers mean nothing, and its cache must not be shared.
    """

    is_attached = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._ended = EndedTransfers(wake)

    def start(self, copies: list[PageCopy]) -> None:
        away = [copy.id for copy in copies if not copy.is_on_device]
        if away:
            self._ended.put(CopyResult(away))

    def look(self, lookups: list[Lookup]) -> None:
        """A transfer backend has no lookups."""
        assert not lookups

    def execute(self, ops: list[KVTransferOp]) -> None:
        for op in ops:
            match op:
                case FindTransfer():
                    self._ended.put(TransferFound(op.transfer_id, op.prompt_len))
                case ReceiveTransfer():
                    self._ended.put(PrefillResult(op.transfer_id, _FIRST))
                case PrefillResult() | CloseTransfer():
                    self._ended.put(TransferClosed(op.transfer_id))
                case OpenTransfer():
                    pass

    def ended(self) -> list[End]:
        return self._ended.take()

    def close(self) -> None:
        """Nothing to release."""


class FakeWithoutHost:
    """Satisfies PageMover: transfers that name no prefill server are fake, the others real.

    Args:
        real: the mover of --disaggregation-transfer-backend.
    """

    is_attached = True

    def __init__(self, real: PageMover, wake: Callable[[], None]) -> None:
        self._real = real
        self._fake = FakeTransfer(wake)

    def start(self, copies: list[PageCopy]) -> None:
        here: list[PageCopy] = []
        others: list[PageCopy] = []
        for copy in copies:
            transfer_id = b"" if copy.is_on_device else transfer_position(copy.src.key)[0]
            (here if is_fake_transfer(transfer_id) else others).append(copy)
        self._fake.start(here)
        self._real.start(others)

    def look(self, lookups: list[Lookup]) -> None:
        self._real.look(lookups)

    def execute(self, ops: list[KVTransferOp]) -> None:
        for op in ops:
            (self._fake if is_fake_transfer(op.transfer_id) else self._real).execute([op])

    def ended(self) -> list[End]:
        return [*self._fake.ended(), *self._real.ended()]

    def close(self) -> None:
        self._real.close()


def open_fake(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> FakeTransfer:
    """The mover of --disaggregation-transfer-backend fake."""
    log.warning("no pages travel with the transfer backend fake: answers mean nothing")
    return FakeTransfer(wake)
