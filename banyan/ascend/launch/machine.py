"""This machine as the rules read it: chip, interfaces, packages, CANN, limits; and its checks by
`banyan doctor --device npu`.

Files are read below a root, and the doctor reads everything through `Box`, so that a test can
describe any machine.
"""

import csv
import fcntl
import os
import platform
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from banyan.ascend.launch.facts import SOCS, Breach, Finding, Soc, breach, finding_of
from banyan.base.errors import ConfigError
from banyan.base.os import num_cores
from banyan.config.env import read_environment

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


SHARED_MEMORY_GB = 16
MANAGEMENT = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
GOVERNOR = "performance"
_GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
MIGRATION_NS = "50000"
_MIGRATION_FILES = (
    ("proc/sys/kernel/sched_migration_cost_ns", "sysctl -w kernel.sched_migration_cost_ns=50000"),
    (
        "sys/kernel/debug/sched/migration_cost_ns",
        "echo 50000 > /sys/kernel/debug/sched/migration_cost_ns",
    ),
)
WANTED_SYSCTLS = {"vm.swappiness": "0", "kernel.numa_balancing": "0"}
"""Kernel settings that every machine needs, in the form of sysctl.d."""
_MOST_SWAPPINESS = 10
_HIDDEN = "not exposed"
_ABSENT = "not installed"


@dataclass(frozen=True)
class Check:
    """One fact of a machine, and the wanted value.

    Attributes:
        wanted: "" where any value will do.
        finding: what is wrong, None when nothing is.
    """

    name: str
    value: str
    wanted: str = ""
    finding: Finding | None = None


@dataclass(frozen=True)
class Pair:
    """A release of torch_npu, the release of CANN that it needs, and its Pythons."""

    package: str
    cann: str
    first_python: str
    last_python: str


def examine(box: Box, soc: Soc) -> list[Check]:
    """Every fact, in the order of a table."""
    parts = (_system, _packages, _devices, _limits)
    return [check for part in parts for check in part(box, soc)]


def verdict(checks: list[Check], box: Box) -> str:
    """One line: which pair this is, and what is wrong."""
    findings = [check.finding for check in checks if check.finding is not None]
    errors = sum(finding.is_error for finding in findings)
    found = f"torch {_or(box.versions('torch'))}, torch_npu {_or(box.versions('torch-npu'))}, "
    found += f"CANN {_or(box.cann)}"
    rules = {finding.rule for finding in findings}
    if rules & {"23f", "23n", "23p"} or not box.cann:
        pair = "no supported pair"
    else:
        pair = "a pair that no table has" if "23o" in rules else "a supported pair"
    return f"{pair}: {found}; {errors} errors, {len(findings) - errors} warnings"


def _or(text: str) -> str:
    return text or _ABSENT


def _check(name: str, value: str, wanted: str, is_kept: bool, wrong: Breach) -> Check:
    return Check(name, value, wanted, None if is_kept else finding_of(wrong))


def _system(box: Box, soc: Soc) -> Iterator[Check]:
    most_of = {"vm.swappiness": ("23b", _MOST_SWAPPINESS), "kernel.numa_balancing": ("23c", 0)}
    for name, wanted in WANTED_SYSCTLS.items():
        rule, most = most_of[name]
        value = box.read(f"proc/sys/{name.replace('.', '/')}")
        is_kept = not value.isdigit() or int(value) <= most
        wrong = breach(rule, value=value, wanted=wanted)
        yield _check(name, value or _HIDDEN, wanted, is_kept, wrong)
    governor = box.read(_GOVERNOR)
    is_kept = governor in ("", GOVERNOR)
    wrong = breach("23a", value=governor, wanted=GOVERNOR)
    yield _check("scaling_governor", governor or _HIDDEN, GOVERNOR, is_kept, wrong)
    for path, fix in _MIGRATION_FILES:
        cost = box.read(path)
        if cost:
            wrong = breach("23d", value=cost, wanted=MIGRATION_NS, fix=fix)
            yield _check("sched_migration_cost_ns", cost, MIGRATION_NS, cost == MIGRATION_NS, wrong)
            return
    yield Check("sched_migration_cost_ns", _HIDDEN, MIGRATION_NS)


def _packages(box: Box, soc: Soc) -> Iterator[Check]:
    torch, package, cann = box.versions("torch"), box.versions("torch-npu"), box.cann
    yield Check("driver", box.package(DRIVER) or "unknown version")
    yield Check("firmware", box.package(FIRMWARE) or "unknown version")
    wanted = f"{_release(torch)}.*" if torch else ""
    yield _check("torch_npu", _or(package), wanted, bool(package), breach("23p", wanted=wanted))
    same = not package or _release(torch) == _release(package)
    wrong = breach("23f", torch=_or(torch), package=package, wanted=f"{_release(package)}.*")
    yield _check("torch", _or(torch), f"{_release(package)}.*" if package else "", same, wrong)
    pair = next((pair for pair in pairs() if pair.package == package), None)
    yield _cann(cann, package, pair)
    first, last = (pair.first_python, pair.last_python) if pair else ("3.11", "3.11")
    is_kept = _numbers(first) <= _numbers(box.python)[:2] <= _numbers(last)
    span = first if first == last else f"{first} to {last}"
    wrong = breach("23e", value=box.python, package=_or(package), wanted=span)
    yield _check("python", box.python, span, is_kept, wrong)


def _cann(cann: str, package: str, pair: Pair | None) -> Check:
    if not package or not cann:
        return Check("CANN", _or(cann), pair.cann if pair else "")
    if pair is None:
        known = ", ".join(f"{p.package} with {p.cann}" for p in pairs()[:3])
        return Check(
            "CANN", cann, "", finding_of(breach("23o", package=package, value=cann, wanted=known))
        )
    is_kept = _numbers(cann)[:2] == _numbers(pair.cann)
    wrong = breach("23n", package=package, wanted=pair.cann, value=cann)
    return _check("CANN", cann, pair.cann, is_kept, wrong)


def _devices(box: Box, soc: Soc) -> Iterator[Check]:
    found = box.devices
    wrong = breach("23g", value=found, wanted=soc.devices, soc=soc.name)
    yield _check("/dev/davinci*", str(found), str(soc.devices), found == soc.devices, wrong)
    for path in MANAGEMENT:
        is_here = box.has(path.lstrip("/"))
        value = "here" if is_here else "missing"
        yield _check(path, value, "here", is_here, breach("23h", value=path))
    is_here = box.has(DRIVER)
    value = "here" if is_here else "missing"
    yield _check(f"/{DRIVER}", value, "here", is_here, breach("23i", value=f"/{DRIVER}"))


def _limits(box: Box, soc: Soc) -> Iterator[Check]:
    shared = f"{box.shared_gib:.1f}"
    is_kept = box.shared_gib >= SHARED_MEMORY_GB
    wrong = breach("23j", value=shared, wanted=SHARED_MEMORY_GB)
    yield _check("/dev/shm GB", shared, f"{SHARED_MEMORY_GB} or more", is_kept, wrong)
    value = "set" if box.is_sourced else "not set"
    yield _check("CANN's set_env.sh", value, "set", box.is_sourced, breach("23k"))
    locked = "unlimited" if box.memlock < 0 else f"{box.memlock:,} bytes"
    is_kept = box.memlock < 0 or not soc.needs_rdma
    wrong = breach("23l", value=locked, wanted="no bound")
    yield _check("memlock", locked, "unlimited" if soc.needs_rdma else "", is_kept, wrong)
    pins = box.variables.get("SGLANG_SET_CPU_AFFINITY", "") not in ("", "0")
    is_kept = not pins or box.cores >= soc.devices
    wrong = breach("23m", value=box.cores, wanted=soc.devices)
    yield _check("cores", str(box.cores), f"{soc.devices} or more" if pins else "", is_kept, wrong)


@cache
def pairs() -> tuple[Pair, ...]:
    """The vendor's table of compatible releases, newest first."""
    with open(Path(__file__).parent / "pairs.tsv", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(Pair(row["torch_npu"], row["cann"], *row["python"].split("-")) for row in rows)


def _release(version: str) -> str:
    """Major and minor number, as "2.13"."""
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def npu_doctor(soc: str, box: Box | None = None) -> bool:
    """Print the table of a machine, this one by default; returns whether anything is an error."""
    name = soc or find_soc(box.root if box else "/")
    if name not in SOCS and name:
        raise ConfigError(f"no chip is called {name}", hint=f"give --soc {' or '.join(SOCS)}")
    box = box or this_box(read_environment().launch)
    chip = SOCS[name or "A3"]
    print(f"\n{'Ascend NPU':<24} {name or 'none is seen; taken for an A3'}")
    checks = examine(box, chip)
    for check in checks:
        wanted = f" (wanted: {check.wanted})" if check.wanted else ""
        print(f"{check.name:<24} {check.value}{wanted}")
        if check.finding is not None:
            print(f"{'':<24} {check.finding.severity}: {check.finding.use}")
    print(f"{'verdict':<24} {verdict(checks, box)}")
    return any(check.finding is not None and check.finding.is_error for check in checks)
