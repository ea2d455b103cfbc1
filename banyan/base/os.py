"""The system that a process runs on: cores, files in memory, events, addresses, the own version.

Banyan needs Linux: eventfd, memfd, /proc and the parent-death signal.
"""

import ctypes
import errno
import os
import platform
import signal
import stat
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO

from banyan.base.errors import ConfigError

SYSTEM = platform.system()
_PR_SET_PDEATHSIG = 1


def unsupported_reason() -> str:
    """Why nothing can be served on this system; "" on Linux."""
    return "" if SYSTEM == "Linux" else f"Banyan needs Linux, and this is {SYSTEM or 'unknown'}"


def check_system() -> None:
    """Refuse to start on another system than Linux.

    Raises:
        ConfigError: this is not Linux.
    """
    if reason := unsupported_reason():
        raise ConfigError(
            reason, hint="run it in Docker (docker/cpu.Dockerfile), or in WSL 2 on Windows"
        )


def available_cores() -> list[int]:
    """Numbers of the cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def num_cores() -> int:
    """Number of cores that this process may use. Quotas of a container are not considered."""
    return len(os.sched_getaffinity(0))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def anonymous_memory(name: str, size_bytes: int = 0, can_seal: bool = False) -> int:
    """Create a file that exists in memory only; it is closed in a new program.

    Args:
        name: shown in /proc.
        can_seal: its size may be fixed later (F_ADD_SEALS).

    Returns:
        Its descriptor.

    Raises:
        OSError: there is not so much memory.
    """
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_seal else 0)
    descriptor = os.memfd_create(name, flags)
    if size_bytes:
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading. A pipe or device is refused: it may have no end.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(handle, "rb")


def read_whole(path: str, most_bytes: int) -> bytes:
    """Read a small regular file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it has more than {most_bytes:,} bytes")
    return content


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_CUDA_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Files of drivers whose devices torch calls CUDA: NVIDIA's, the one of WSL 2, Tegra's, AMD's."""


def num_gpus(visible: str | None, folder: Path = Path("/dev")) -> int | None:
    """Number of NVIDIA GPUs that this process may use; None = it is not known before the driver is
    asked.

    Args:
        visible: CUDA_VISIBLE_DEVICES. A number that no device has ends the list.
    """
    here = sum(path.name.removeprefix("nvidia").isdecimal() for path in folder.glob("nvidia*"))
    if not here or visible is None:
        return here or None
    count = 0
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG"):
            return 1  # a process uses one part of a GPU
        if not (name.startswith("GPU") or (name.isdecimal() and int(name) < here)):
            break
        count += 1
    return count


def has_cuda_driver() -> bool:
    """Whether torch may find a CUDA device here: a driver, and a torch that is not for CPUs only.
    torch is not imported."""
    is_there = any(os.path.exists(path) for path in _CUDA_DRIVERS)
    return is_there and not version("torch").endswith("+cpu")
