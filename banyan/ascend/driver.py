"""The driver of Ascend NPUs: the one place that imports it, or its emulation.

Importing either makes torch know the device "npu" and the operators of `torch.ops.npu`. A process
can have one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import read_environment
from banyan.platform.base import Interconnect

log = logger(__name__)

EMULATED = "emulated"
_EMULATION = "tests.emulation.device"
_BACKEND = "HCCL"
_FABRIC, _EMULATED_FABRIC = "memfabric_hybrid", "tests.emulation.fabric"
_FUSING, _EMULATED_FUSING = "deep_ep", "tests.emulation.deep_ep"
_RDMA, _SDMA = "device_rdma", "sdma"
_WITH_RDMA = "Ascend910B"
"""How chips are called whose devices copy to each other by RDMA; others have SDMA."""
_MEETING_S = 60.0

distributed = cast(Any, torch.distributed)  # which types nothing of its backends


@dataclass(frozen=True)
class Driver:
    """
    Attributes:
        npu: streams, memory and graphs (`torch.npu`).
        is_checked: calls of operators are to be held against their contracts.
        options: of a process group of its collectives.
        buffer: megabytes of each group, as HCCL_BUFFSIZE says; "" = the library's own choice.
        rounds_sent: rows that go to the ranks of their experts by counts travel as 8 bits.
        fuses_latents: what comes before latent attention is to be one operator.
        fractal_pages: pages of latents are to have the fractal form.
        exchange_buffer: the same of groups that experts are exchanged in (DEEPEP_HCCL_BUFFSIZE).
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
        """A process group of `size` ranks that meet at a store of torch's.

        is_exchange: operators alone use it, by its name, to exchange rows.

        Raises:
            ConfigError: no such buffer can be.
        """
        met = distributed.distributed_c10d._DistributedBackendOptions()
        met.store, met.group_rank, met.group_size = store, rank, size
        met.timeout, met.group_id = timedelta(seconds=timeout_s), name or "ranks"
        met.global_ranks_in_group = []  # all of them: there is no larger group
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
        return distributed.Backend._plugins[_BACKEND].creator_fn(met, options)


def open_driver() -> Driver:
    """
    Raises:
        ConfigError: there is no driver, no emulation, or no such thing.
    """
    wishes = read_environment().npu
    if wishes.driver == EMULATED:
        options = _open_emulation(wishes.soc)
    elif wishes.driver:
        raise ConfigError(
            f"BANYAN_NPU={wishes.driver}: no driver has that name",
            hint=f"leave it out for a real device, or set it to {EMULATED}",
        )
    else:
        options = _open_real()
    npu = torch.get_device_module("npu")
    npu.config.allow_internal_format = True  # weights may have the device's fractal form
    wanted = (wishes.buffer, wishes.exchange_buffer, wishes.rounds_sent)
    forms = (wishes.fuses_latents, wishes.fractal_pages)
    return Driver(npu, wishes.is_checked, options, *wanted, *forms)


def open_interconnect(chip: str) -> Interconnect:
    """MemFabric, ready to be started.

    Args:
        chip: what the driver calls it.

    Raises:
        ConfigError: the package is not there, or ASCEND_MF_TRANSFER_PROTOCOL is nothing it can do.
    """
    wishes = read_environment().npu
    protocol = wishes.protocol.lower() or (_RDMA if chip.startswith(_WITH_RDMA) else _SDMA)
    if protocol not in (_RDMA, _SDMA):
        raise ConfigError(
            f"ASCEND_MF_TRANSFER_PROTOCOL={wishes.protocol}: pages go by {_SDMA} or {_RDMA}",
            hint="unset it: the chip decides",
        )
    try:
        library = import_module(_FABRIC)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--disaggregation-transfer-backend ascend: its engine does not load: {error}",
            hint="run: pip install 'banyan[memfabric]'",
        ) from None
    if wishes.driver == EMULATED:
        library = import_module(_EMULATED_FABRIC)
        log.warning("the engine of MemFabric is emulated: pages go over the loopback")
    if protocol == _RDMA:  # HCCL has to be there before anything else uses RDMA
        met = open_driver().group(distributed.HashStore(), 0, 1, _MEETING_S, _FABRIC)
        x = torch.zeros(1, device="npu")
        met.allgather([[torch.empty_like(x)]], [x]).wait()
    return Interconnect(library, protocol, wishes.store)


def open_fusing() -> ModuleType:
    """The library whose operators send rows to experts, run these and bring the sums back.

    Raises:
        ConfigError: it is not there.
    """
    if read_environment().npu.driver == EMULATED:
        return import_module(_EMULATED_FUSING)
    try:
        return import_module(_FUSING)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--moe-a2a-backend ascend_fuseep: the package deep_ep does not load: {error}",
            hint="build deep_ep of sgl-kernel-npu for this CANN, or give deepep",
        ) from None


def _open_real() -> Callable[[], Any]:
    if find_spec("torch_npu") is None:
        raise ConfigError(
            "--device npu: the package torch_npu is not installed",
            hint=f"install the one for this torch, or set BANYAN_NPU={EMULATED} to try without",
        )
    driver = import_module("torch_npu")
    npu = driver.npu
    if not npu.is_available():
        raise ConfigError("--device npu: torch_npu finds no device", hint="look at npu-smi info")
    npu.set_compile_mode(jit_compile=False)
    return driver._C._distributed_c10d.ProcessGroupHCCL.Options


def _open_emulation(soc: str) -> Callable[[], Any]:
    if find_spec("tests") is None or find_spec("tests.emulation") is None:
        raise ConfigError(
            f"BANYAN_NPU={EMULATED}: the emulated device is not here",
            hint="it is a part of the tests: start from the folder of the source",
        )
    try:
        return import_module(_EMULATION).install(soc).group_options
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"BANYAN_NPU={EMULATED}: {error}") from None
