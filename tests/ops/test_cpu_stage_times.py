"""What a timed run of a program says of its stages."""

import subprocess
from pathlib import Path

import pytest

from banyan.ops.cpu.build import SOURCES, compilers

HERE = Path(__file__).parent / "csrc"


@pytest.mark.skipif(not any(compilers()), reason="no C++ compiler is here")
def test_a_stage_takes_what_its_units_took_though_the_caller_was_held_up(tmp_path):
    compiler = next(compilers())
    program = tmp_path / "stage_times"
    sources = [str(HERE / "stage_times.cpp"), str(SOURCES / "pool.cpp")]
    build = [*compiler.compile(tmp_path), "-O1", f"-I{SOURCES}", *sources, "-o", str(program)]
    subprocess.run(build, check=True, capture_output=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    hold, work, let_go, together = map(int, output.stdout.split())
    assert min(work, let_go) >= 30_000_000  # they sleep so long, while the caller does nothing
    assert hold + work + let_go <= together
