"""`banyan doctor` and `banyan version`: what is here, what this machine offers, what is missing."""

import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata

from banyan.ascend.launch.machine import device_numbers, npu_doctor
from banyan.base.errors import ConfigError, ModelError
from banyan.base.install import VERSION
from banyan.base.os import unsupported_reason
from banyan.cli.check import take
from banyan.config.env import Environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch

USAGE = """banyan doctor [--device npu] [--soc A2|A3]

Shows what this machine offers and what is missing. With --device npu, or where there are Ascend
NPUs, also what they need: each value, what is wanted, the command that puts it right, and whether
torch, torch_npu and CANN are a pair that the vendor supports.
"""

_COMPILERS = ("c++", "g++", "clang++")
_PACKAGES = ("torch", "numpy", "tokenizers", "huggingface_hub", "uvicorn", "msgspec", "pyzmq")
_OPTIONAL = ("modelscope",)
_SETTINGS = {
    "swappiness": "/proc/sys/vm/swappiness",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "sched_migration_cost_ns": "/proc/sys/kernel/sched_migration_cost_ns",
    "scaling_governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
}
"""Settings of the system that speed depends on: name -> where Linux keeps it."""


def doctor(argv: Sequence[str]) -> int:
    """Print one line per fact; 1 when something needed is missing."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    words, device = take(list(argv), "--device")
    words, soc = take(words, "--soc")
    if words or device not in ("", "cpu", "npu"):
        raise ConfigError(f"banyan doctor does not take {' '.join(argv)}", hint="see --help")
    missing = [name for name in _PACKAGES if not _version_of(name)]
    for name, value in _facts():
        print(f"{name:<12} {value}")
    verdict = f"missing: {', '.join(missing)}; install banyan again" if missing else "all is there"
    verdict = unsupported_reason() or verdict
    print(f"{'verdict':<12} {verdict}")
    is_ill = bool(missing or unsupported_reason())
    if device == "npu" or (not device and device_numbers()):
        is_ill |= npu_doctor(soc)
    return int(is_ill)


def version(argv: Sequence[str]) -> int:
    """Print the version; --json adds Python and torch."""
    if "--json" in argv:
        versions = {
            "banyan": VERSION,
            "python": platform.python_version(),
            "torch": _version_of("torch"),
        }
        print(json.dumps(versions))
    else:
        print(f"banyan {VERSION}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "banyan", VERSION
    yield "system", f"{platform.system()} {platform.machine()}{_speed()}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _PACKAGES:
        yield name, _version_of(name) or "MISSING"
    for name in _OPTIONAL:
        yield name, _version_of(name) or "not installed (optional)"
    from banyan.platform.cpu import CpuPlatform

    cpu = CpuPlatform()
    memory = cpu.memory()
    yield "cores", f"{cpu.traits.cores} usable of {os.cpu_count()}"
    yield "features", " ".join(sorted(cpu.traits.features)) or "none of those the kernels ask for"
    yield "memory", f"{memory.free_bytes / 2**30:.1f} GiB free of {memory.total_bytes / 2**30:.1f}"
    yield "settings", _settings()
    compilers = [name for name in _COMPILERS if shutil.which(name)]
    if importlib.util.find_spec("ziglang"):
        compilers.append("ziglang")
    from banyan.ops.cpu.build import machine_isa, prebuilt_library

    isa = machine_isa()
    has_come = prebuilt_library(isa) is not None
    yield "kernels", f"{isa}, {'came along' if has_come else 'compiled at the first start'}"
    lacking = "none" if has_come else "none (kernels fall back to torch)"
    yield "compilers", ", ".join(compilers) or lacking
    yield "demo model", _demo_model()


def _speed() -> str:
    """What there are no kernels with instruction sets of its own for."""
    is_fast = platform.machine() in ("x86_64", "AMD64")
    return "" if is_fast else " (kernels in plain C++: slower than on x86-64)"


def _settings() -> str:
    found = []
    for name, path in _SETTINGS.items():
        try:
            with open(path, encoding="ascii") as file:
                found.append(f"{name}={file.read().strip()}")
        except OSError:
            found.append(f"{name}=unknown")
    return " ".join(found)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _demo_model() -> str:
    try:
        return fetch(LoadConfig(offline=True), Environment())
    except ModelError as error:
        return str(error)
