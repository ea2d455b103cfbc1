"""The library is built once per machine and for every instruction set there is code for."""

import ctypes

import pytest

from banyan.ops.cpu.build import ISAS, BuildError, cached_library, compilers, machine_isa

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


def test_without_a_working_compiler_the_reason_names_each(tmp_path, monkeypatch):
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter(()))
    with pytest.raises(BuildError, match="no C.. compiler: install g.."):
        cached_library(folder=tmp_path)


def test_a_compiler_that_fails_is_told_with_its_message(tmp_path, monkeypatch):
    words = ("sh", "-c", "echo 'x.cpp:1: error: nope' >&2; exit 3")
    monkeypatch.setattr(
        "banyan.ops.cpu.build.compilers",
        lambda named: iter([type("C", (), {"words": words, "name": "sh"})()]),
    )
    with pytest.raises(BuildError, match="sh: exit 3: x.cpp:1: error: nope"):
        cached_library(folder=tmp_path)
