"""The library is built once per machine and for every instruction set there is code for."""

import ctypes
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from banyan.ops.cpu import build, build_process
from banyan.ops.cpu.build import (
    ISAS,
    SOURCES,
    BuildError,
    Compiler,
    _target,
    cached_library,
    compilers,
    isas_of,
    machine_isa,
    platform_tag,
    prebuilt_library,
    usable_isa,
)
from banyan.ops.cpu.build_process import definitions_for, sources_for
from banyan.ops.cpu.library import Library, open_library
from tests.ops.emulation import CACHE

needs_compiler = pytest.mark.skipif(not any(compilers()), reason="no C++ compiler is here")
FULL = pytest.mark.full
FLAGS = "avx2 fma f16c bmi2"
AVX512 = f"{FLAGS} avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("sse2 avx", "base"),
        ("avx2 fma f16c", "base"),
        (FLAGS, "avx2"),
        (f"{FLAGS} avx512f", "avx2"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_vnni", "vnni"),
        (f"{AVX512} amx_tile amx_int8 amx_bf16", "avx512"),
        (f"{AVX512} avx512_vnni amx_tile amx_int8 amx_bf16", "amx"),
    ],
)
def test_the_instruction_set_is_the_highest_with_everything_it_needs(tmp_path, flags, isa):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert machine_isa(cpuinfo) == isa


def test_a_machine_that_says_nothing_runs_the_plain_code(tmp_path):
    assert machine_isa(tmp_path / "missing") == "base"


@needs_compiler
@pytest.mark.parametrize(
    "isa",
    [isa if isa in ("base", machine_isa()) else pytest.param(isa, marks=FULL) for isa in ISAS],
)
def test_a_library_for_any_instruction_set_compiles_and_uses_what_the_machine_has(isa, monkeypatch):
    """Only the best of the machine is optimised; `make test-wheel` builds all as they run."""
    folder = None
    if isa != machine_isa():
        words = next(compilers()).words
        hasty = Compiler(("sh", "-c", f'exec {shlex.join(words)} "$@" -O0', "cc"))
        monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter([hasty]))
        folder = CACHE / "not-optimised"
    path = cached_library(folder=folder, isa=isa)
    library = ctypes.CDLL(str(path))
    assert ISAS[library.bn_machine_isa()] == usable_isa(isa)
    assert cached_library(folder=folder, isa=isa) == path


@pytest.mark.parametrize(
    ("isa", "linear", "attention"),
    [
        ("base", {"base"}, {"base"}),
        ("avx2", {"base", "avx2"}, {"base", "avx2"}),
        ("avx512", {"base", "avx2"}, {"base", "avx2", "avx512"}),
        ("vnni", {"base", "vnni"}, {"base", "avx2", "avx512", "pairs_vnni"}),
        ("amx", {"base", "amx"}, {"base", "avx2", "avx512", "pairs_amx"}),
    ],
)
def test_only_what_an_instruction_set_runs_is_compiled_for_it(isa, linear, attention):
    """And well optimised is what serves there."""
    sources = {source.name: source for source in sources_for(isa)}
    assert {f"linear_{each}" for each in linear} == {
        stem for stem in sources if stem.startswith("linear_") and stem != "linear_pack"
    }
    assert {f"attention_{each}" for each in attention} == {
        stem for stem in sources if stem.startswith("attention_") and stem != "attention_check"
    }
    seldom = {stem for stem, source in sources.items() if source.is_seldom_run}
    assert "linear_base" not in seldom if isa == "base" else "linear_base" in seldom
    assert ("attention_avx2" in seldom) == ("avx512" in attention)
    assert not {"linear_amx", "linear_vnni", "attention_avx512", "linear", "pool"} & seldom


def test_no_code_for_an_instruction_set_is_compiled_and_then_not_looked_for():
    """Tables of families name their code by what the build defines; another name finds nothing."""
    texts = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    for isa in ISAS:
        for definition in definitions_for(isa)[1:]:
            name = definition.removeprefix("-D")
            assert name.endswith("_BASE") or f"#ifdef {name}\n" in texts, name


def test_code_that_fails_its_check_is_replaced_by_that_of_lower_instructions(monkeypatch, caplog):
    """And so are instructions that the processor has, but the system does not give."""

    class Stub:
        def __init__(self, path, threads, quantization):
            self.isa = {"amx": "vnni"}.get(path, path)

        def problems(self):
            return ["linear: wrong"] if self.isa == "avx512" else []

        def close(self):
            closed.append(self.isa)

    closed = []
    log = logging.getLogger("banyan.ops.cpu")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr("banyan.ops.cpu.library.Library", Stub)
    monkeypatch.setattr("banyan.ops.cpu.build.cached_library", lambda compiler, isa: isa)

    assert open_library("amx", 1, "", "").isa == "vnni"
    assert open_library("avx512", 1, "", "").isa == "avx2"
    assert closed == ["vnni", "avx512"]
    assert caplog.messages == [
        "amx is not used: the system does not give its registers",
        "avx512 is not used: linear: wrong",
    ]


class Prebuilt:
    """Libraries that came with the package, on a machine whose compiler may be gone."""

    def __init__(self, folder, monkeypatch):
        self.monkeypatch = monkeypatch
        self.asked = []
        monkeypatch.setattr("banyan.ops.cpu.build.PREBUILT", folder / "prebuilt")
        monkeypatch.setattr("banyan.ops.cpu.build.cached_library", self.build)
        monkeypatch.setattr("banyan.ops.cpu.library.Library", self.load)
        self.broken, self.has_compiler = set(), False

    def bring(self, isa):
        path = _target(build.PREBUILT, isa)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
        return path

    def build(self, compiler, isa):
        self.asked.append(isa)
        if not self.has_compiler:
            raise BuildError("no C++ compiler")
        return f"built {isa}"

    def load(self, path, threads, quantization):
        if path in self.broken:
            raise OSError("version `GLIBC_2.99' not found")
        at = {_target(build.PREBUILT, isa): isa for isa in ISAS}
        isa = at.get(path) or str(path).removeprefix("built ")
        wrong = ["linear: wrong"] if f"wrong {isa}" in self.broken and path in at else []
        return SimpleNamespace(isa=isa, path=path, problems=lambda: wrong, close=lambda: None)

    def open(self, isa, compiler=""):
        self.asked.clear()
        return open_library(isa, 1, compiler, "").path


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    return Prebuilt(tmp_path, monkeypatch)


def test_a_library_that_came_along_serves_without_a_compiler(prebuilt):
    path = prebuilt.bring("avx2")
    assert prebuilt.open("avx2") == path
    assert prebuilt.asked == []


def test_next_to_a_named_compiler_nothing_that_came_along_is_used(prebuilt):
    prebuilt.bring("avx2")
    prebuilt.has_compiler = True
    assert prebuilt.open("avx2", "my-c++") == "built avx2"


@pytest.mark.parametrize("how", ["cannot be loaded", "fails its check"])
def test_what_came_along_and_does_not_fit_is_compiled_here(prebuilt, how):
    path = prebuilt.bring("vnni")
    prebuilt.broken = {path if how == "cannot be loaded" else "wrong vnni"}
    prebuilt.has_compiler = True
    assert prebuilt.open("vnni") == "built vnni"
    assert prebuilt.asked == ["vnni"]


def test_without_a_compiler_lower_instructions_that_came_along_serve(prebuilt):
    broken, lower = prebuilt.bring("vnni"), prebuilt.bring("avx2")
    prebuilt.broken = {broken}
    assert prebuilt.open("vnni") == lower
    assert prebuilt.asked == ["vnni", "avx512"]


def test_without_a_compiler_and_with_nothing_that_works_the_reason_is_reported(prebuilt):
    prebuilt.broken = {prebuilt.bring("base")}
    with pytest.raises(BuildError, match="no C.. compiler"):
        prebuilt.open("vnni")


def test_what_came_along_of_other_sources_is_not_found(prebuilt, tmp_path, monkeypatch):
    prebuilt.bring("avx2")
    changed = tmp_path / "csrc"
    shutil.copytree(SOURCES, changed)
    (changed / "rows.h").write_text("// another\n")
    assert prebuilt_library("avx2") is not None
    monkeypatch.setattr("banyan.ops.cpu.build.SOURCES", changed)
    assert prebuilt_library("avx2") is None


def test_a_wheel_says_which_systems_its_libraries_run_on():
    libraries = [b"..GLIBC_2.2.5..GLIBC_2.17.", b"GLIBC_2.34\0GLIBC_2.14\0GLIBCXX_3.4.29"]
    assert platform_tag(libraries, "x86_64") == "manylinux_2_34_x86_64"
    assert platform_tag([b"GLIBC_2.2.5"], "x86_64") == "manylinux_2_5_x86_64"
    assert platform_tag([b""], "aarch64") == "linux_aarch64"
    assert isas_of("x86_64") == ISAS and isas_of("aarch64") == ("base",)


def test_what_is_wished_for_is_cut_down_to_what_the_machine_has(monkeypatch):
    monkeypatch.setattr("banyan.ops.cpu.build.machine_isa", lambda: "avx512")
    assert [usable_isa(isa) for isa in ("", "avx2", "amx")] == ["avx512", "avx2", "avx512"]


def test_a_named_compiler_goes_first():
    first = next(compilers("ccache my-c++ -O1"))
    assert (first.words, first.name) == (("ccache", "my-c++", "-O1"), "ccache")


def test_the_packaged_compiler_builds_for_the_plainest_machine_and_keeps_nothing(tmp_path):
    zig = Compiler(("python", "-m", "ziglang", "c++"))
    assert {"-mcpu=baseline", "-fno-sanitize=all"} <= set(zig.compile(tmp_path))
    assert zig.link(tmp_path)[:3] == (
        "env",
        f"ZIG_GLOBAL_CACHE_DIR={tmp_path}/zig",
        f"ZIG_LOCAL_CACHE_DIR={tmp_path}/zig",
    )


@pytest.mark.skipif(not find_spec("ziglang"), reason="the ziglang package is not installed")
def test_the_packaged_compiler_gives_a_library_that_checks_itself(tmp_path, monkeypatch):
    zig = [Compiler((sys.executable, "-m", "ziglang", "c++"))]
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter(zig))
    library = Library(cached_library(folder=tmp_path), 2)
    assert library.isa == machine_isa()
    assert library.problems() == []
    library.close()


def test_without_a_working_compiler_the_reason_names_each(tmp_path, monkeypatch):
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter(()))
    with pytest.raises(BuildError, match="no C.. compiler: install g.."):
        cached_library(folder=tmp_path)


def test_a_compiler_that_fails_is_reported_with_its_message(tmp_path, monkeypatch):
    words = ("sh", "-c", "echo 'x.cpp:1: error: nope' >&2; exit 3")
    monkeypatch.setattr(
        "banyan.ops.cpu.build.compilers",
        lambda named: iter([Compiler(words)]),
    )
    with pytest.raises(BuildError, match="sh: exit 3: x.cpp:1: error: nope"):
        cached_library(folder=tmp_path)


@needs_compiler
def test_progress_is_counted_and_the_work_is_gone_when_it_is_done(tmp_path, monkeypatch, capfd):
    quick = Compiler(
        ("sh", "-c", 'while [ "$1" != -o ]; do shift; done; sleep 0.5; : > "$2"', "cc")
    )
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter([quick]))
    path = cached_library(folder=tmp_path, isa="base")
    output = capfd.readouterr().err
    assert re.search(r"with sh, once: (\d+) files, about \d+ s on \d+ cores", output), output
    assert re.search(r"compiling the CPU kernels: \d+ of \d+ files, about \d+ s left", output), (
        output
    )
    assert "compiled the CPU kernels in" in output
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, "lock"]


def test_compilers_end_with_the_process_that_wants_the_library(tmp_path):
    asking, pids = begin_endless_build(tmp_path)
    assert all(Path("/proc", pid).exists() for pid in pids)
    asking.kill()
    asking.wait()
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    until(lambda: not list(tmp_path.glob("*/compiling-*")))


def test_a_compiler_that_is_too_slow_ends_with_what_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(build_process, "_TIMEOUT_S", 1)
    seen = tmp_path / "pid"
    words = ("sh", "-c", f"sleep 1000 & echo $! > {seen}; wait")
    assert build_process._Commands().run(words, tmp_path) == "no end after 1 s"
    until(lambda: not Path("/proc", seen.read_text().strip()).exists())


def test_the_estimate_counts_what_else_the_machine_does(tmp_path):
    read = tmp_path / "loadavg"
    read.write_text("9.10 3.00 1.00 7/300 4242\n")
    assert build_process._slowness(2, read) == 4.0  # six others share two cores with two of ours
    read.write_text("0.00 0.00 0.00 1/300 4242\n")
    assert build_process._slowness(2, read) == build_process._slowness(2, tmp_path / "none") == 1.0


def test_who_waits_for_the_compilers_of_another_process_can_leave(tmp_path):
    asking, pids = begin_endless_build(tmp_path)
    waiting, _ = begin_endless_build(tmp_path, "waiting for the CPU kernels")
    waiting.kill()
    waiting.wait()
    assert asking.poll() is None and all(Path("/proc", pid).exists() for pid in pids)
    asking.kill()
    asking.wait()
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def begin_endless_build(folder: Path, awaited: str = "") -> tuple[subprocess.Popen, list[str]]:
    """A process that asks for the library of a compiler without end; the compiler's processes."""
    seen = folder / "pids"
    script = f"echo $$ >> {seen}; sleep 1000 & echo $! >> {seen}; : > $TMPDIR/part; wait"
    code = f"""
import json, sys
from pathlib import Path
from banyan.ops.cpu import build, build_process
found = build.Compiler(("sh", "-c", json.loads({json.dumps(json.dumps(script))}), "cc"))
build.compilers = lambda named: iter([found])
build.cached_library(folder=Path({str(folder)!r}), isa="base")
"""
    asking = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert asking.stderr is not None
    awaited = awaited or "compiling the CPU kernels"
    assert any(awaited in line for line in iter(asking.stderr.readline, ""))
    until(lambda: seen.exists() and len(seen.read_text().split()) >= 2)
    return asking, seen.read_text().split()


def until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
