"""Devices by name."""

from banyan.base.table import Table
from banyan.platform.base import Platform

PLATFORMS: Table[type[Platform]] = Table(
    "device",
    {"cpu": "banyan.platform.cpu:CpuPlatform", "null": "banyan.platform.null:NullPlatform"},
    plugins="banyan.platforms",
)
