"""Builds the libraries of a wheel: `python -m banyan.ops.cpu.prebuild FOLDER`.

There is one for each instruction set of this kind of machine. The machine need not have them,
because nothing is run. Standard output is the wheel's platform tag.
"""

import platform
import re
import shutil
import sys
from pathlib import Path

from banyan.base.log import logger, start_logging
from banyan.ops.cpu.build import ISAS, BuildError, cached_library

_MANYLINUX_FROM = 5
"""Oldest minor version of glibc 2 that installers know by name."""
_log = logger("banyan.ops.cpu.prebuild")


def isas_of(machine: str) -> tuple[str, ...]:
    """The instruction sets with code for a kind of machine."""
    return ISAS if machine in ("x86_64", "AMD64") else ISAS[:1]


def prebuild(folder: Path, machine: str) -> str:
    """Fill a folder with the libraries, built or cached; returns their platform tag.

    Raises:
        BuildError: no compiler can build them.
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
    """Tag of the oldest system whose glibc suffices for the libraries (PEP 600)."""
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
