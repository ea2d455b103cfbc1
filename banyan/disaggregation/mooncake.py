"""--disaggregation-transfer-backend mooncake: Mooncake's transfer engine writes pages over TCP, or
over RDMA by the devices of --disaggregation-ib-device.

Engines find each other by themselves (P2PHANDSHAKE), without a metadata server. The engine listens
on every interface and has no authentication; it exposes only the landing slots.
"""

from collections.abc import Callable, Sequence

import numpy as np

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.disaggregation.tcp import open_with_engine
from banyan.disaggregation.transfer import TransferOptions
from banyan.disaggregation.transfer_engine import HostMemory, Landing
from banyan.kv_transfer.page_mover import PageMover, Pages


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
