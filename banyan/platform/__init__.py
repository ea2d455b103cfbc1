"""Devices by name."""

import torch

from banyan.base.table import Table
from banyan.platform.base import Platform

PLATFORMS: Table[type[Platform]] = Table(
    "device",
    {
        "cpu": "banyan.platform.cpu:CpuPlatform",
        "cuda": "banyan.platform.cuda:CudaPlatform",
        "npu": "banyan.ascend.platform:NpuPlatform",
        "null": "banyan.platform.null:NullPlatform",
    },
    plugins="banyan.platforms",
)


def open_platform(name: str) -> Platform:
    """The platform of that name; "auto" is an accelerator where torch finds one, else the CPU.

    Raises:
        ConfigError: there is no such platform, or no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return PLATFORMS.load(name)()
