"""An emulated Ascend NPU: BANYAN_NPU=tests.ascend.emulation opens it in place of torch_npu.

The functions are those of `banyan.ascend.driver.DriverModule`.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def open_device(soc: str) -> Callable[[], Any]:
    from tests.ascend.emulation.device import install  # compiles and imports torch

    return install(soc).group_options


def open_fabric() -> ModuleType:
    return import_module("tests.ascend.emulation.fabric")


def open_deep_ep() -> ModuleType:
    return import_module("tests.ascend.emulation.deep_ep")
