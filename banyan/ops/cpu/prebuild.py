"""Builds the libraries that a wheel brings along: `python -m banyan.ops.cpu.prebuild FOLDER`.

One for each instruction set of this kind of machine, whether it has them or not: nothing is run.
Standard output says the platform that the wheel is for, as its name says it.
"""

import platform
import re
import shutil
import sys
from pathlib import Path

from banyan.base.log import logger, start_logging
from banyan.ops.cpu.build import ISAS, BuildError, cached_library

_MANYLINUX_FROM = 5
"""Oldest minor version of glibc 2 whose name installers understand."""
_log = logger("banyan.ops.cpu.prebuild")


def isas_of(machine: str) -> tuple[str, ...]:
    """The instruction sets that there is code for on a kind of machine."""
    return ISAS if machine in ("x86_64", "AMD64") else ISAS[:1]


def prebuild(folder: Path, machine: str) -> str:
    """Fill a folder with what the cache holds, or will; the platform tag of what is in it.

    Raises:
        BuildError: no compiler can.
    """
    paths = []
    for isa in isas_of(machine):
        built = cached_library(isa=isa)
        paths.append(folder / built.parent.name / built.name)
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, paths[-1])
    sizes = " + ".join(f"{path.stat().st_size / 2**20:.2f}" for path in paths)
    _log.info("%d libraries, %s MiB", len(paths), sizes)
    return platform_tag([path.read_bytes() for path in paths], machine)


def platform_tag(libraries: list[bytes], machine: str) -> str:
    """The oldest system that has all that the libraries ask of glibc (PEP 600)."""
    asked = [int(minor) for each in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", each)]
    if not asked:
        return f"linux_{machine}"  # another C library: only systems like this one
    return f"manylinux_2_{max(asked + [_MANYLINUX_FROM])}_{machine}"


if __name__ == "__main__":
    start_logging("build", "info")
    try:
        sys.stdout.write(prebuild(Path(sys.argv[1]), platform.machine()))
    except BuildError as error:
        raise SystemExit(f"no wheel with compiled kernels: {error}") from None
