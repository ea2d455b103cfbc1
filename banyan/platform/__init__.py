"""Platforms by device name."""

from banyan.base.os import has_cuda_driver
from banyan.base.table import Table
from banyan.platform.base import Platform

PLATFORMS: Table[type[Platform]] = Table(
    "device",
    {
        "cpu": "banyan.platform.cpu:CpuPlatform",
        "cuda": "banyan.platform.cuda:CudaPlatform",
        "npu": "banyan.ascend.platform:NpuPlatform",
        "null": "banyan.platform.base:NullPlatform",
    },
    plugins="banyan.platforms",
)


def open_platform(name: str) -> Platform:
    """The platform `name`; "auto" = CUDA if torch finds a device, else the CPU.

    The CPU is opened without an import of torch, which takes seconds.

    Raises:
        ConfigError: no platform has that name, or no device of that kind is here.
    """
    if name == "auto":
        name = "cuda" if has_cuda_driver() and _finds_cuda() else "cpu"
    return PLATFORMS.load(name)()


def _finds_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
