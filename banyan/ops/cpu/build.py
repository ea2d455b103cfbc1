"""Builds the compiled kernels: C++ sources to one shared library, cached by its inputs.

A library is built for one instruction set, so that no time is spent on code that never runs. It
contains the best kernels of each family, and plain code to check them against. Compilers are tried
in this order: the configured one, g++, clang++, and the `ziglang` package (a C++ compiler as a
wheel). Nothing is downloaded.

The cache key consists of sources, options and instruction set, so an unchanged library is built
once per user, in a separate process (`build_process`). A wheel may contain libraries under the same
keys. Libraries of other sources or options have other keys and are not used.

    python -m banyan.ops.cpu.build           builds the library of this machine
    python -m banyan.ops.cpu.build FOLDER    builds the libraries of a wheel; prints its tag
"""

import hashlib
import importlib.util
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from banyan.base.log import logger, start_logging

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries of a wheel; missing in a source tree."""
LIBRARY = "libbanyan_cpu.so"
OPTIONS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    # A product and a sum are fused only where the source says so: results are the same everywhere.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
ISAS = ("base", "avx2", "avx512", "vnni", "amx")
"""Instruction sets in ascending order; indices as in csrc/runtime.h."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
OPTIONS_BY_ISA = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "vnni": (*_AVX512, "-mavx512vnni"),
    "amx": (*_AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
"""Suffix of a file's name -> options of its instruction set; such files are for x86-64 only."""
FAMILIES = {
    "attention": ("base", "avx2", "avx512"),
    "experts": ("base", "avx2", "avx512"),
    "lora": ("base", "avx2", "avx512"),
    "pack": ("avx2", "avx512"),
    "probe": ("base", "avx2", "avx512", "vnni"),
    "rows": ("base", "avx2", "avx512"),
    "sample": ("base", "avx2", "avx512"),
    "state": ("base", "avx2", "avx512"),
}
"""csrc/<family>.inl is compiled once for each of these sets. Its table of kernels, BN_TABLE in the
source, is called <family>_<set>. A set with a file of its own (linear_amx.cpp) is not listed."""
OFTEN_RUN, SELDOM_RUN = "-O3", "-O1"
"""Optimisation of serving kernels, and of kernels for checks and rare shapes."""
STAND_INS = {"attention_avx512": "attention_avx2"}
"""Kernels -> the kernels for the other head sizes: 8, 24, 40 …"""
_ZIG = (
    # Its own defaults are this machine's instruction set and checks for undefined behaviour.
    "-mcpu=baseline",
    "-fno-sanitize=all",
    "-g0",
    # It would compile a C++ runtime first; csrc/standalone.cpp is what we need of one.
    "-fno-exceptions",
    "-fno-rtti",
    "-DBN_STANDALONE",
)
_ZIG_LINK = ("-nostdlib", "-lc", "-lm")
_NEEDS = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "vnni": {"avx512_vnni"},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
}
"""Flags that /proc/cpuinfo must list, in addition to the flags of lower sets."""
_log = logger("banyan.ops.cpu.build")


class BuildError(Exception):
    """No library can be built; the text gives the reason in one line."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, as the start of a command line."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return "ziglang" if "ziglang" in self.words else self.words[0]

    def compile(self, work: Path) -> tuple[str, ...]:
        """Start of a command that compiles; its temporary files go to the folder `work`."""
        return (*self._command(work), *OPTIONS, *(_ZIG if self.name == "ziglang" else ()))

    def link(self, work: Path) -> tuple[str, ...]:
        """Start of a command that links a shared library."""
        options = _ZIG_LINK if self.name == "ziglang" else ("-pthread",)
        return (*self._command(work), "-shared", *options)

    def _command(self, work: Path) -> tuple[str, ...]:
        if self.name != "ziglang":
            return self.words
        caches = (f"ZIG_{which}_CACHE_DIR={work}/zig" for which in ("GLOBAL", "LOCAL"))
        return ("env", *caches, *self.words)


def compilers(named: str = "") -> Iterator[Compiler]:
    """The compilers of this machine, best first.

    Args:
        named: a command line to try first; "" = none.
    """
    if named:
        yield Compiler(tuple(shlex.split(named)))
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            yield Compiler((name,))
    if importlib.util.find_spec("ziglang"):
        yield Compiler((sys.executable, "-m", "ziglang", "c++"))


def machine_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The highest instruction set of this machine for which kernels exist."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "base"
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    best = "base"
    for isa, needs in _NEEDS.items():
        if not needs <= flags:
            break
        best = isa
    return best


def usable_isa(wished: str = "") -> str:
    """The instruction set to build for: the machine's best, or `wished` if that is lower."""
    return min(wished or ISAS[-1], machine_isa(), key=ISAS.index)


def prebuilt_library(isa: str) -> Path | None:
    """The library in the package for this instruction set and these sources."""
    path = _target(PREBUILT, isa)
    return path if path.is_file() else None


def cached_library(named_compiler: str = "", folder: Path | None = None, isa: str = "") -> Path:
    """The path of the built library; builds it if it is not in the cache.

    Args:
        folder: the cache; default: ~/.cache/banyan/kernels.
        isa: which of ISAS to build for; default: the machine's best.

    Raises:
        BuildError: there is no compiler, or none can build the library.
    """
    isa = isa or machine_isa()
    target = _target(folder, isa)
    if target.is_file():
        return target
    found = list(compilers(named_compiler))
    if not found:
        raise BuildError("no C++ compiler: install g++ or clang++, or the ziglang package")
    with _Building(target, isa, found) as building:
        reason = building.wait()
    if reason:
        raise BuildError(reason)
    return target


def library_paths(isa: str, compiler: str) -> Iterator[Path]:
    """Paths of libraries for an instruction set, best first; the last one is built on demand.

    Raises:
        BuildError: it cannot be built, and the package has none for lower sets either.
    """
    came = None if compiler else prebuilt_library(isa)
    if came is not None:
        yield came
    try:
        yield cached_library(compiler, isa=isa)
    except BuildError as error:
        lower = () if compiler else ISAS[: ISAS.index(isa)]
        if not any(map(prebuilt_library, lower)):
            raise
        _log.warning("%s cannot be built: %s", isa, error)


@contextmanager
def building_ahead(named_compiler: str = "", wished_isa: str = "") -> Iterator[None]:
    """Build the library for `cached_library` in the background, during the block.

    A failure is not reported here: `cached_library` fails again and reports it.
    """
    isa = usable_isa(wished_isa)
    target = _target(None, isa)
    is_there = target.is_file() or (not named_compiler and prebuilt_library(isa) is not None)
    found = [] if is_there else list(compilers(named_compiler))
    if not found:
        yield
        return
    try:
        building = _Building(target, isa, found)
    except BuildError:
        yield
        return
    with building:
        yield


class _Building:
    """A child process that builds a library, unless another process already does."""

    def __init__(self, target: Path, isa: str, found: list[Compiler]) -> None:
        words = [each.words for each in found]
        job = json.dumps({"target": str(target), "isa": isa, "compilers": words})
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"the folder for compiled kernels cannot be used: {error}") from error
        self._process = subprocess.Popen(
            [sys.executable, "-m", "banyan.ops.cpu.build_process", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its group is its compilers', and no terminal's
        )

    def wait(self) -> str:
        """ "" once the library exists, or the reason why it does not."""
        assert self._process.stdout is not None
        reason = self._process.stdout.read()
        code = self._process.wait()
        return reason or (f"the compiling process ended with exit code {code}" if code else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Source:
    """One compilation.

    Attributes:
        path: a .cpp file, or the .inl file of a family.
        isa: the instruction set; "" = any.
        is_seldom_run: the code need not be fast.
    """

    path: Path
    isa: str = ""
    is_seldom_run: bool = False

    @property
    def name(self) -> str:
        """Name of the object file and of its kernel table."""
        is_family = self.path.suffix == ".inl"
        return f"{self.path.stem}_{self.isa}" if is_family else self.path.stem

    @property
    def family(self) -> str:
        return self.name.removesuffix(f"_{self.isa}")

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of a compiler that name the source."""
        if self.path.suffix == ".inl":
            return (f"-DBN_TABLE={self.name}", "-x", "c++", str(self.path))
        return (str(self.path),)


def all_sources() -> list[Source]:
    """All compilations of csrc, for all instruction sets."""
    files = [Source(path, _isa(path.stem)) for path in sorted(SOURCES.glob("*.cpp"))]
    families = [
        Source(SOURCES / f"{family}.inl", isa) for family, isas in FAMILIES.items() for isa in isas
    ]
    return sorted(files + families, key=lambda source: source.name)


def _isa(stem: str) -> str:
    """The instruction set in a file's name; "" = none."""
    last = stem.rpartition("_")[2]
    return last if last in ISAS else ""


def _target(folder: Path | None, isa: str) -> Path:
    folder = folder or Path.home() / ".cache" / "banyan" / "kernels"
    return folder / _fingerprint(isa) / LIBRARY


def _fingerprint(isa: str) -> str:
    options = (OPTIONS, OPTIONS_BY_ISA, FAMILIES, OFTEN_RUN, SELDOM_RUN, STAND_INS, _ZIG, _ZIG_LINK)
    choices = (options, platform.machine(), isa)
    digest = hashlib.sha256(repr(choices).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


_MANYLINUX_FROM = 5
"""Oldest minor version of glibc 2 that installers know by name."""


def isas_of(machine: str) -> tuple[str, ...]:
    """The instruction sets with code for a kind of machine."""
    return ISAS if machine in ("x86_64", "AMD64") else ISAS[:1]


def prebuild(folder: Path, machine: str) -> str:
    """Fill a folder with the libraries, built or cached; returns their platform tag.

    There is one for each instruction set of this kind of machine. The machine need not have them,
    because nothing is run.

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
        if sys.argv[1:]:
            sys.stdout.write(prebuild(Path(sys.argv[1]), platform.machine()))
        else:
            path = prebuilt_library(machine_isa()) or cached_library()
            _log.info("the CPU kernels are in %s", path)
    except BuildError as error:
        if sys.argv[1:]:
            raise SystemExit(f"no wheel with compiled kernels: {error}") from None
        _log.warning("plain torch will serve: %s", error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
