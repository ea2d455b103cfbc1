"""--disaggregation-transfer-backend nixl: a NIXL agent writes pages over UCX.

UCX chooses the transport between two servers; UCX_TLS, UCX_NET_DEVICES and
--disaggregation-ib-device restrict it.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from banyan.base.errors import ConfigError
from banyan.disaggregation.tcp import open_with_engine
from banyan.disaggregation.transfer import TransferOptions
from banyan.disaggregation.transfer_engine import HostMemory, Landing
from banyan.kv_transfer.page_mover import PageMover, Pages

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
