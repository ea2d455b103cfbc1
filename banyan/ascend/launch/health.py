"""`banyan doctor --device npu`: checks of a machine with Ascend NPUs, and their table."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from banyan.ascend.launch.facts import SOCS, Soc
from banyan.ascend.launch.files import MANAGEMENT, SHARED_MEMORY_GB
from banyan.ascend.launch.findings import Breach, Finding, breach, finding_of
from banyan.ascend.launch.machine import DRIVER, FIRMWARE, Box, find_soc, this_box
from banyan.base.errors import ConfigError
from banyan.config.env import read_environment

_GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
_MIGRATION = "50000"
_MIGRATION_FILES = (
    ("proc/sys/kernel/sched_migration_cost_ns", "sysctl -w kernel.sched_migration_cost_ns=50000"),
    (
        "sys/kernel/debug/sched/migration_cost_ns",
        "echo 50000 > /sys/kernel/debug/sched/migration_cost_ns",
    ),
)
_MOST_SWAPPINESS = 10
_HIDDEN = "not exposed"
_ABSENT = "not installed"


@dataclass(frozen=True)
class Check:
    """One fact of a machine, beside what is wanted of it.

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
    """A release of torch_npu, the release of CANN that it goes with, and its Pythons."""

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
    for rule, name, path, wanted, most in (
        ("23b", "vm.swappiness", "proc/sys/vm/swappiness", "0", _MOST_SWAPPINESS),
        ("23c", "kernel.numa_balancing", "proc/sys/kernel/numa_balancing", "0", 0),
    ):
        value = box.read(path)
        is_kept = not value.isdigit() or int(value) <= most
        wrong = breach(rule, value=value, wanted=wanted)
        yield _check(name, value or _HIDDEN, wanted, is_kept, wrong)
    governor = box.read(_GOVERNOR)
    is_kept = governor in ("", "performance")
    wrong = breach("23a", value=governor, wanted="performance")
    yield _check("scaling_governor", governor or _HIDDEN, "performance", is_kept, wrong)
    for path, fix in _MIGRATION_FILES:
        cost = box.read(path)
        if cost:
            wrong = breach("23d", value=cost, wanted=_MIGRATION, fix=fix)
            yield _check("sched_migration_cost_ns", cost, _MIGRATION, cost == _MIGRATION, wrong)
            return
    yield Check("sched_migration_cost_ns", _HIDDEN, _MIGRATION)


def _packages(box: Box, soc: Soc) -> Iterator[Check]:
    torch, package, cann = box.versions("torch"), box.versions("torch-npu"), box.cann
    yield Check("driver", box.package(DRIVER) or "no version told")
    yield Check("firmware", box.package(FIRMWARE) or "no version told")
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
    """The vendor's table of releases that go together, newest first."""
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
