"""The driver of Ascend NPUs: the one place that imports it, or its emulation.

Importing either makes torch know the device "npu" and the operators of `torch.ops.npu`. A process
can have one of them.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from banyan.base.errors import ConfigError
from banyan.config.env import read_environment

EMULATED = "emulated"
_EMULATION = "tests.emulation.device"


@dataclass(frozen=True)
class Driver:
    """
    Attributes:
        npu: streams, memory and graphs (`torch.npu`).
        is_checked: calls of operators are to be held against their contracts.
    """

    npu: ModuleType
    is_checked: bool


def open_driver() -> Driver:
    """
    Raises:
        ConfigError: there is no driver, no emulation, or no such thing.
    """
    wishes = read_environment().npu
    if wishes.driver == EMULATED:
        _open_emulation(wishes.soc)
    elif wishes.driver:
        raise ConfigError(
            f"BANYAN_NPU={wishes.driver}: no driver has that name",
            hint=f"leave it out for a real device, or set it to {EMULATED}",
        )
    else:
        _open_real()
    npu = torch.get_device_module("npu")
    npu.config.allow_internal_format = True  # weights may have the device's fractal form
    return Driver(npu, wishes.is_checked)


def _open_real() -> None:
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


def _open_emulation(soc: str) -> None:
    if find_spec("tests") is None or find_spec("tests.emulation") is None:
        raise ConfigError(
            f"BANYAN_NPU={EMULATED}: the emulated device is not here",
            hint="it is a part of the tests: start from the folder of the source",
        )
    try:
        import_module(_EMULATION).install(soc)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"BANYAN_NPU={EMULATED}: {error}") from None
