"""The operating system: what Banyan is built on is Linux's (eventfd, memfd, /proc, signals to
children whose parent dies)."""

import platform

from banyan.base.errors import ConfigError

SYSTEM = platform.system()


def trouble() -> str:
    """Why nothing can be served on this system; "" when it is Linux."""
    return "" if SYSTEM == "Linux" else f"Banyan needs Linux, and this is {SYSTEM or 'unknown'}"


def check_system() -> None:
    """
    Raises:
        ConfigError: this is no Linux.
    """
    if trouble():
        raise ConfigError(
            trouble(), hint="run it in Docker (docker/cpu.Dockerfile), or in WSL 2 on Windows"
        )
