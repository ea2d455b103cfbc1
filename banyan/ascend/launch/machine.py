"""This machine as the rules and the doctor read it: chip, interfaces, packages, CANN, limits.

Files are read below a root, and the doctor reads everything through `Box`, so that a test can
describe any machine.
"""

import fcntl
import os
import platform
import re
import resource
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from banyan.ascend.launch.facts import SOCS
from banyan.base.os import num_cores

_VENDOR = "0x19e5"
_CHIPS = {"0xd802": "A2", "0xd803": "A3"}
"""Number of the device on the PCI bus -> chip."""
_ADDRESS_OF = 0x8915
"""The request SIOCGIFADDR."""
PACKAGES = ("memfabric_hybrid", "torch_npu")


def find_soc(root: str = "/") -> str:
    """The chip of this machine, by the PCI bus or by its device files; "" = none found."""
    base = Path(root)
    for device in sorted(base.glob("sys/bus/pci/devices/*")):
        if _read_file(device / "vendor") == _VENDOR and _read_file(device / "device") in _CHIPS:
            return _CHIPS[_read_file(device / "device")]
    count = len(device_numbers(root))
    if not count:
        return ""
    return "A3" if count > SOCS["A2"].devices else "A2"


def device_numbers(root: str = "/") -> list[int]:
    """N of each /dev/davinciN."""
    names = (path.name for path in Path(root).glob("dev/davinci*"))
    found = (re.fullmatch(r"davinci(\d+)", name) for name in names)
    return sorted(int(each.group(1)) for each in found if each)


def own_interfaces() -> dict[str, tuple[str, ...]]:
    """Network interface -> its IPv4 address."""
    found: dict[str, tuple[str, ...]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, asked)
            except OSError:
                found[name] = ()  # it has none
            else:
                found[name] = (socket.inet_ntoa(answer[20:24]),)
    return found


def own_packages() -> frozenset[str]:
    return frozenset(name for name in PACKAGES if find_spec(name) is not None)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


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
        """A file's text, "" = not readable."""
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
        """Version of CANN, "" = not found."""
        homes = [self.variables[name].lstrip("/") for name in _HOMES if self.variables.get(name)]
        for place in (*homes, *_CANN_PLACES):
            for pattern in _CANN_FILES:
                for path in sorted((Path(self.root) / place).glob(pattern)):
                    found = _CANN_VERSION.search(self.read(str(path.relative_to(self.root))))
                    if found:
                        return found.group(1) or found.group(2)
        return ""

    def package(self, folder: str) -> str:
        """Version of the driver or the firmware, "" = unknown."""
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
