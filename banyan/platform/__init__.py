"""Devices by name."""

from banyan.base.table import Table
from banyan.platform.base import Platform

PLATFORMS: Table[type[Platform]] = Table(
    "device",
    {"cpu": "banyan.platform.cpu:CpuPlatform", "null": "banyan.platform.null:NullPlatform"},
    plugins="banyan.platforms",
)


def open_platform(name: str) -> Platform:
    """The platform of that name; ConfigError lists the names when there is no such."""
    return PLATFORMS.load("cpu" if name == "auto" else name)()
