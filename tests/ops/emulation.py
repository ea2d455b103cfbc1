"""Builds the compiled library with AVX-512, VNNI and AMX in halves of AVX2 (csrc/emulated.h), so
that the code for wider machines runs where the tests run. Slow code, quickly compiled."""

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
_WIDE = ("avx512", "vnni", "amx")
_QUICK_TO_COMPILE = ("linear_vnni", "linear_amx")
"""Many templates of long unrolled loops: optimised, they take twenty times as long to compile."""


_LEFT_OUT = ("probe", "attention_pairs")
"""What probes the speed of a machine has no place in an emulation of it, and bf16 has none here."""
_EVERYTHING = (
    f"-DBN_BUILT_FOR={len(ISAS) - 1}",
    *(
        f"-DBN_{source.name.upper()}"
        for source in all_sources()
        if source.isa and not source.name.startswith(_LEFT_OUT)
    ),
)


def cached_emulation(compiler: tuple[str, ...], folder: Path) -> Path:
    """The library, built unless `folder` holds that of these sources."""
    assert machine_isa() != "base", "the emulation needs AVX2"
    digest = hashlib.sha256(repr(compiler).encode())
    for source in (*sorted(SOURCES.iterdir()), *sorted(HERE.iterdir()), Path(__file__)):
        digest.update(source.read_bytes())
    library = folder / f"{digest.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes one builds it
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                os.replace(_build(compiler, Path(work)), library)
    return library


def _build(compiler: tuple[str, ...], folder: Path) -> Path:
    jobs = [_job(compiler, source, folder) for source in all_sources()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(_run, [job for job in jobs if job]))
    objects = [str(path) for path in folder.glob("*.o")]
    library = folder / "emulated.so"
    _run((*compiler, "-shared", "-pthread", *objects, "-o", str(library)))
    return library


def _job(compiler: tuple[str, ...], source: Source, folder: Path) -> tuple[str, ...]:
    """The command that compiles a source, () where there is nothing to compile."""
    name, isa = source.name, source.isa
    if name.startswith(_LEFT_OUT) and isa in _WIDE:
        return ()
    options = ("-O0" if name in _QUICK_TO_COMPILE else "-O1", *_EVERYTHING)
    if isa in _WIDE:
        options += (
            *OPTIONS_BY_ISA["avx2"],
            "-w",
            "-Wno-psabi",
            "-include",
            str(HERE / "emulated.h"),
        )
    else:
        options += OPTIONS_BY_ISA.get(isa, ())
    words = (str(HERE / "isa_emulated.cpp"),) if name == "isa" else source.words
    return (
        *(*compiler, *OPTIONS, *options, f"-I{SOURCES}"),
        *("-c", *words, "-o", str(folder / f"{name}.o")),
    )


def _run(words: tuple[str, ...]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stderr}"
