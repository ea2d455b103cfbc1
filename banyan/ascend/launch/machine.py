"""This machine as rules and the doctor see it: its chip, its interfaces, packages that are here.

Files are read below a root, so that a test can lay out a machine of its own.
"""

import fcntl
import re
import socket
import struct
from importlib.util import find_spec
from pathlib import Path

from banyan.ascend.launch.facts import SOCS

_VENDOR = "0x19e5"
_CHIPS = {"0xd802": "A2", "0xd803": "A3"}
"""Number of the device on the PCI bus -> chip."""
_ADDRESS_OF = 0x8915
"""The request SIOCGIFADDR."""
PACKAGES = ("memfabric_hybrid", "torch_npu")


def find_soc(root: str = "/") -> str:
    """The chip of this machine, "" where none is seen: by the PCI bus, or by the devices."""
    base = Path(root)
    for device in sorted(base.glob("sys/bus/pci/devices/*")):
        if _read(device / "vendor") == _VENDOR and _read(device / "device") in _CHIPS:
            return _CHIPS[_read(device / "device")]
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
