"""The driver of Ascend NPUs: the one place that imports torch_npu, or its substitute.

Importing a driver registers the device "npu" and the operators of `torch.ops.npu` with torch. A
process can have one driver. BANYAN_NPU names a module that replaces torch_npu, for example the
emulated device of the tests; `DriverModule` is its interface.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol, cast

import torch
import torch.distributed

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import logger
from banyan.config.env import read_environment
from banyan.platform.base import Interconnect

log = logger(__name__)

_BACKEND = "HCCL"
_FABRIC, _DEEP_EP = "memfabric_hybrid", "deep_ep"
_RDMA, _SDMA = "device_rdma", "sdma"
_WITH_RDMA = "Ascend910B"
"""Prefix of the chips whose devices copy to each other by RDMA; the others have SDMA."""
_RENDEZVOUS_S = 60.0

distributed = cast(Any, torch.distributed)  # torch has no types for its backends


class DriverModule(Protocol):
    """The functions of a module that BANYAN_NPU names: torch_npu and its libraries, replaced."""

    def open_device(self, soc: str) -> Callable[[], Any]:
        """Register the device "npu" with torch; returns the options class of its process groups.

        Args:
            soc: the chip, "A2" or "A3".

        Raises:
            RuntimeError, ValueError: the device cannot be made.
        """
        ...

    def open_fabric(self) -> ModuleType:
        """In place of `memfabric_hybrid`."""
        ...

    def open_deep_ep(self) -> ModuleType:
        """In place of `deep_ep`."""
        ...


@dataclass(frozen=True)
class Driver:
    """
    Attributes:
        npu: streams, memory and graphs (`torch.npu`).
        is_checked: each operator call is checked against its contract.
        options: makes the options of a process group.
        buffer: megabytes of each group (HCCL_BUFFSIZE); "" = the library's default.
        exchange_buffer: megabytes of each expert-exchange group (DEEPEP_HCCL_BUFFSIZE).
        rounds_sent: rows sent to the ranks of their experts by counts travel as int8.
        fuses_latents: use the fused prologue of latent attention.
        fractal_pages: latent pages have the fractal form.
    """

    npu: ModuleType
    is_checked: bool
    options: Callable[[], Any]
    buffer: str
    exchange_buffer: str = ""
    rounds_sent: bool = False
    fuses_latents: bool = False
    fractal_pages: bool = False

    def group(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        name: str,
        is_exchange: bool = False,
    ) -> Any:
        """A process group of `size` ranks that meet at a torch store.

        Args:
            is_exchange: only operators use the group, by its name, to exchange expert rows.

        Raises:
            ConfigError: the buffer size is not a number of megabytes.
        """
        backend = distributed.distributed_c10d._DistributedBackendOptions()
        backend.store, backend.group_rank, backend.group_size = store, rank, size
        backend.timeout, backend.group_id = timedelta(seconds=timeout_s), name or "ranks"
        backend.global_ranks_in_group = []  # all ranks: there is no larger group
        options = self.options()
        buffer, name = self.buffer, "HCCL_BUFFSIZE"
        if is_exchange and self.exchange_buffer:
            buffer, name = self.exchange_buffer, "DEEPEP_HCCL_BUFFSIZE"
        if buffer:
            if not buffer.isdecimal() or not int(buffer):
                raise ConfigError(
                    f"{name}={buffer}: it is a whole number of megabytes, from 1 on",
                    hint="set it to 200, or unset it",
                )
            options.hccl_config = {"hccl_buffer_size": int(buffer)}
        return distributed.Backend._plugins[_BACKEND].creator_fn(backend, options)


def open_driver() -> Driver:
    """
    Raises:
        ConfigError: the driver is missing, or cannot be opened.
    """
    settings = read_environment().npu
    options = _open_module(settings.driver, settings.soc) if settings.driver else _open_real()
    npu = torch.get_device_module("npu")
    npu.config.allow_internal_format = True  # weights may have the device's fractal form
    return Driver(
        npu=npu,
        is_checked=settings.is_checked,
        options=options,
        buffer=settings.buffer,
        exchange_buffer=settings.exchange_buffer,
        rounds_sent=settings.rounds_sent,
        fuses_latents=settings.fuses_latents,
        fractal_pages=settings.fractal_pages,
    )


def open_interconnect(chip: str) -> Interconnect:
    """MemFabric, ready to be started.

    Args:
        chip: the driver's name of it.

    Raises:
        ConfigError: the package is missing, or ASCEND_MF_TRANSFER_PROTOCOL is unknown.
    """
    settings = read_environment().npu
    protocol = settings.protocol.lower() or (_RDMA if chip.startswith(_WITH_RDMA) else _SDMA)
    if protocol not in (_RDMA, _SDMA):
        raise ConfigError(
            f"ASCEND_MF_TRANSFER_PROTOCOL={settings.protocol}: pages go by {_SDMA} or {_RDMA}",
            hint="unset it: the chip decides",
        )
    try:
        library = import_module(_FABRIC)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--disaggregation-transfer-backend ascend: its engine does not load: {error}",
            hint=f"run: {install_command('memfabric')}",
        ) from None
    if settings.driver:
        library = _module(settings.driver).open_fabric()
        log.warning("the engine of MemFabric is emulated: pages go over the loopback")
    if protocol == _RDMA:  # HCCL must be open before anything else uses RDMA
        store = distributed.HashStore()
        group = open_driver().group(store, 0, 1, _RENDEZVOUS_S, _FABRIC)
        x = torch.zeros(1, device="npu")
        group.allgather([[torch.empty_like(x)]], [x]).wait()
    return Interconnect(library, protocol, settings.store)


def open_deep_ep() -> ModuleType:
    """The library whose operators dispatch rows to experts, run these and combine the results.

    Raises:
        ConfigError: it is not installed.
    """
    if driver := read_environment().npu.driver:
        return _module(driver).open_deep_ep()
    try:
        return import_module(_DEEP_EP)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--moe-a2a-backend ascend_fuseep: the package deep_ep does not load: {error}",
            hint="build deep_ep of sgl-kernel-npu for this CANN, or give deepep",
        ) from None


def _open_real() -> Callable[[], Any]:
    if find_spec("torch_npu") is None:
        raise ConfigError(
            "--device npu: the package torch_npu is not installed",
            hint="install the one for this torch",
        )
    driver = import_module("torch_npu")
    npu = driver.npu
    if not npu.is_available():
        raise ConfigError("--device npu: torch_npu finds no device", hint="look at npu-smi info")
    npu.set_compile_mode(jit_compile=False)
    return driver._C._distributed_c10d.ProcessGroupHCCL.Options


def _open_module(name: str, soc: str) -> Callable[[], Any]:
    try:
        return _module(name).open_device(soc)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"BANYAN_NPU={name}: {error}") from None


def _module(name: str) -> DriverModule:
    try:
        return cast(DriverModule, import_module(name))
    except ImportError as error:
        raise ConfigError(
            f"BANYAN_NPU={name}: this module does not load: {error}",
            hint="unset it for a real device; it names a Python module that emulates one",
        ) from None
