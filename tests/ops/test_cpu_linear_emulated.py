"""The projections of instruction sets that this machine lacks, on emulated vectors and tiles.

Needs SIMDe's headers (Debian: libsimde-dev), and a minute or more to compile.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest

from banyan.ops.cpu.build import OPTIONS, OPTIONS_BY_ISA, SOURCES, compilers
from banyan.ops.cpu.library import ISAS

EMULATED = Path(__file__).parent / "csrc" / "emulated.cpp"
PLAIN = ("linear.cpp", "linear_base.cpp", "linear_avx2.cpp", "isa.cpp", "pool.cpp")


@pytest.fixture(scope="module")
def compiler() -> tuple[str, ...]:
    found = next(compilers(), None)
    if found is None:
        pytest.skip("no C++ compiler")
    words = (*found.words, "-fsyntax-only", "-x", "c++", "-")
    source = b"#include <simde/x86/avx512/types.h>\n"
    if subprocess.run(words, input=source, capture_output=True).returncode:
        pytest.skip("SIMDe's headers are not installed (libsimde-dev)")
    return found.words


@pytest.mark.slow
def test_kernels_for_wider_machines_agree_with_the_plain_ones(compiler, tmp_path):
    objects = []
    files = [(SOURCES / name, ()) for name in PLAIN]
    files += [(EMULATED, (f'-DKERNEL_FILE="linear_{isa}.cpp"',)) for isa in ("vnni", "amx")]
    for number, (source, defines) in enumerate(files):
        output = tmp_path / f"{number}.o"
        is_narrow = source.parent == SOURCES and not source.stem.endswith("avx2")
        options = () if is_narrow else OPTIONS_BY_ISA["avx2"]
        words = (*compiler, *OPTIONS, *options, "-O1", "-w", "-fpermissive", *defines)
        subprocess.run((*words, f"-I{SOURCES}", "-c", source, "-o", output), check=True)
        objects.append(output)
    library = tmp_path / "library.so"
    subprocess.run((*compiler, "-shared", "-pthread", *objects, "-o", library), check=True)
    check = ctypes.CDLL(str(library)).bn_check_linear
    why = ctypes.create_string_buffer(200)

    for isa in ("vnni", "amx"):
        assert check(ISAS.index(isa), why, len(why)) == 0, f"{isa}: {why.value.decode()}"
