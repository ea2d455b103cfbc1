"""The library is built once per machine and for every instruction set there is code for."""

import ctypes
import sys
from importlib.util import find_spec

import pytest

from banyan.ops.cpu.build import (
    ISAS,
    BuildError,
    Compiler,
    cached_library,
    compilers,
    machine_isa,
)
from banyan.ops.cpu.library import Library

needs_compiler = pytest.mark.skipif(not any(compilers()), reason="no C++ compiler is here")
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
@pytest.mark.slow
def test_every_instruction_set_compiles_and_only_what_the_machine_has_is_used(tmp_path):
    path = cached_library(folder=tmp_path, highest="amx")
    library = ctypes.CDLL(str(path))
    assert ISAS[library.bn_machine_isa()] == machine_isa()
    assert cached_library(folder=tmp_path, highest="amx") == path
    assert cached_library(folder=tmp_path, highest="base") != path


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
    assert library.settle() == []
    library.close()


def test_without_a_working_compiler_the_reason_names_each(tmp_path, monkeypatch):
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter(()))
    with pytest.raises(BuildError, match="no C.. compiler: install g.."):
        cached_library(folder=tmp_path)


def test_a_compiler_that_fails_is_told_with_its_message(tmp_path, monkeypatch):
    words = ("sh", "-c", "echo 'x.cpp:1: error: nope' >&2; exit 3")
    monkeypatch.setattr(
        "banyan.ops.cpu.build.compilers",
        lambda named: iter([Compiler(words)]),
    )
    with pytest.raises(BuildError, match="sh: exit 3: x.cpp:1: error: nope"):
        cached_library(folder=tmp_path)
