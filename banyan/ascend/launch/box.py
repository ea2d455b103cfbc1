"""A machine with Ascend NPUs as the doctor reads it. Everything comes through `Box`, so that a test
can play any machine."""

import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from banyan.ascend.launch.machine import device_numbers
from banyan.base.os import num_cores

DRIVER = "usr/local/Ascend/driver"
FIRMWARE = "usr/local/Ascend/firmware"
_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_CANN_PLACES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
_CANN_FILES = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg")
_CANN_VERSION = re.compile(r"(?im)^version\s*=\s*([\w.]+)|:([\d]+\.[\w.]+)\]")
_PACKAGE_VERSION = re.compile(r"(?im)^version\s*=\s*([\w.]+)")
_GIB = 1 << 30


@dataclass(frozen=True)
class Box:
    """
    Attributes:
        root: where its files lie.
        versions: package -> version, "" where it is not installed.
        memlock: bytes of memory that may be locked; -1 = no bound.
        shared_gib: size of /dev/shm; variables: of this process.
    """

    root: str
    versions: Callable[[str], str]
    variables: Mapping[str, str]
    python: str
    cores: int
    memlock: int
    shared_gib: float

    def read(self, path: str) -> str:
        """A file's text, "" where it is not readable."""
        try:
            return (Path(self.root) / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def has(self, path: str) -> bool:
        return (Path(self.root) / path).exists()

    @property
    def devices(self) -> int:
        return len(device_numbers(self.root))

    @property
    def is_sourced(self) -> bool:
        """Whether CANN's own script has set this process up."""
        return any(self.variables.get(name) for name in _HOMES)

    @property
    def cann(self) -> str:
        """Version of CANN, "" where none is found."""
        homes = [self.variables[name].lstrip("/") for name in _HOMES if self.variables.get(name)]
        for place in (*homes, *_CANN_PLACES):
            for pattern in _CANN_FILES:
                for path in sorted((Path(self.root) / place).glob(pattern)):
                    found = _CANN_VERSION.search(self.read(str(path.relative_to(self.root))))
                    if found:
                        return found.group(1) or found.group(2)
        return ""

    def package(self, folder: str) -> str:
        """Version of the driver or the firmware, "" where it is not told."""
        found = _PACKAGE_VERSION.search(self.read(f"{folder}/version.info"))
        return found.group(1) if found else ""


def this_box(variables: Mapping[str, str]) -> Box:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Box(
        root="/",
        versions=_version_of,
        variables=variables,
        python=platform.python_version(),
        cores=num_cores(),
        memlock=-1 if locked == resource.RLIM_INFINITY else locked,
        shared_gib=shared.f_blocks * shared.f_frsize / _GIB if shared else 0.0,
    )


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
