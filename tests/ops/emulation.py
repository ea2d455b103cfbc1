"""Builds the compiled library for tests: all instruction sets in one, quickly compiled.

Natively it has the sets that the machine has, without AMX. Emulated, AVX-512, VNNI and AMX run in
halves of AVX2 (csrc/emulated.h), so that the code for wider machines runs where the tests run.
"""

import fcntl
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from banyan.ops.cpu.build import (
    ISAS,
    OPTIONS,
    OPTIONS_BY_ISA,
    SOURCES,
    Source,
    all_sources,
    machine_isa,
)

HERE = Path(__file__).parent / "csrc"
CACHE = Path.home() / ".cache" / "banyan" / "test-kernels"
"""Where libraries are kept, so that a fresh clone does not build them again."""
KEPT = 8
"""The newest that are."""
_WIDE = ("avx512", "vnni", "amx")
_QUICK_TO_COMPILE = ("linear_vnni", "linear_amx")
"""Many templates of long unrolled loops: optimised, they take twenty times as long to compile."""


_LEFT_OUT = ("probe", "attention_pairs")
"""The speed of a machine is not probed in an emulation of it, which has no bf16."""


def cached_emulation(compiler: tuple[str, ...]) -> Path:
    """The emulating library, built unless the cache holds that of these sources."""
    assert machine_isa() != "base", "the emulation needs AVX2"
    return _cached(compiler, is_emulated=True)


def cached_native(compiler: tuple[str, ...]) -> Path:
    """The library for this machine, built unless the cache holds that of these sources."""
    return _cached(compiler, is_emulated=False)


def _cached(compiler: tuple[str, ...], is_emulated: bool) -> Path:
    digest = hashlib.sha256(repr((compiler, is_emulated)).encode())
    for source in (*sorted(SOURCES.iterdir()), *sorted(HERE.iterdir()), Path(__file__)):
        digest.update(source.read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    library = CACHE / f"{digest.hexdigest()[:16]}.so"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes one builds it
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                os.replace(_build(compiler, Path(work), is_emulated), library)
            newest_last = sorted(CACHE.glob("*.so"), key=lambda path: path.stat().st_mtime)
            for path in newest_last[:-KEPT]:
                path.unlink()
    return library


def _build(compiler: tuple[str, ...], folder: Path, is_emulated: bool) -> Path:
    def is_in(source: Source) -> bool:
        if is_emulated:
            return source.isa not in _WIDE or not source.name.startswith(_LEFT_OUT)
        return source.isa != "amx"

    sources = [source for source in all_sources() if is_in(source)]
    best = max(ISAS.index(source.isa) for source in sources if source.isa)
    held = [f"-DBN_{source.name.upper()}" for source in sources if source.isa]
    always = (*compiler, *OPTIONS, f"-DBN_BUILT_FOR={best}", *held, f"-I{SOURCES}")

    def compile_one(source: Source) -> None:
        words, options = source.words, OPTIONS_BY_ISA.get(source.isa, ())
        if is_emulated and source.isa in _WIDE:
            header = ("-include", str(HERE / "emulated.h"))
            options = (*OPTIONS_BY_ISA["avx2"], "-w", "-Wno-psabi", *header)
        if is_emulated and source.name == "isa":
            words = (str(HERE / "isa_emulated.cpp"),)
        how = "-O0" if source.name in _QUICK_TO_COMPILE else "-O1"
        _run((*always, how, *options, "-c", *words, "-o", str(folder / f"{source.name}.o")))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(compile_one, sources))
    objects = [str(path) for path in folder.glob("*.o")]
    library = folder / "library.so"
    _run((*compiler, "-shared", "-pthread", *objects, "-o", str(library)))
    return library


def _run(words: tuple[str, ...]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stderr}"
