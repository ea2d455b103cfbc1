"""A start says where its time went and takes no more memory than it may; one that cannot work ends
in seconds, with an exit code of its own and the culprit named.

`tests/cli/test_mistakes.py` makes the mistakes that need no engine; here are whole processes.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file, save_file

from banyan.ops.cpu.build import BuildError, cached_library
from banyan.server.lifecycle.startup import READY_LINE
from tests.system.serving import Server, launch, run_to_end, serving, wait_until

LIMIT_S = 5.0
"""CPU seconds."""
PATIENCE_S = 60.0
MIB = 1 << 20
ROUNDING_S = 0.005
"""Of every figure in the table of phases."""
CLOCK_TICK_S = 0.01
"""The system knows no better when a process began."""


@pytest.fixture(scope="module", autouse=True)
def built_kernels() -> None:
    """The first start on a machine compiles; a mistake is not the place to measure that."""
    with contextlib.suppress(BuildError):
        cached_library()


def refused(log: Path, *flags: str) -> str:
    """Output of a start that must be refused in time with a code that tells why."""
    code, output, seconds = run_to_end(log, *flags, timeout_s=PATIENCE_S)
    assert 2 <= code <= 9, f"exit code {code}:\n{output}"
    assert seconds < LIMIT_S, f"took {seconds:.1f} CPU seconds:\n{output}"
    assert "Traceback" not in output, output
    return output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "spoiled"))


def test_a_model_that_does_not_exist_is_named(log):
    assert "no/such/folder" in refused(log, "--model-path", "./no/such/folder", "--offline")


def test_an_unknown_flag_is_named(log):
    assert "--no-such-flag" in refused(log, "--no-such-flag", "1")


def test_a_missing_tensor_is_named(copy, log):
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors")
    assert "norm.weight" in refused(log, "--model-path", str(copy))


def test_a_tensor_that_has_no_place_is_named(copy, log):
    spoil_header(copy, lambda h: h.update({"model.form.weight": h.pop("model.norm.weight")}))
    assert "model.form.weight" in refused(log, "--model-path", str(copy))


def test_a_truncated_safetensors_file_is_named(copy, log):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "model.safetensors" in refused(log, "--model-path", str(copy))


def test_a_truncated_gguf_file_is_named(demo_model, tmp_path, log):
    short = tmp_path / "short.gguf"
    with demo_model.open("rb") as file:
        short.write_bytes(file.read(20_000_000))
    assert "short.gguf" in refused(log, "--model-path", str(short))


def test_a_cache_smaller_than_a_page_is_refused(tiny_model, log):
    output = refused(log, "--model-path", str(tiny_model), "--max-total-tokens", "1")
    assert output.count("--max-total-tokens 1: ") == 1, output


def test_the_phases_that_are_printed_account_for_the_time_it_took(server):
    with server("--log-level", "debug") as running:
        wait_until(lambda: READY_LINE in running.log.read_text(), PATIENCE_S, READY_LINE)
        text, seen_s = running.log.read_text(), time.time()
        total_s = float(re.search(r"start-up took ([\d.]+) s", text)[1])
        phases = [float(n) for n in re.findall(r"server\] +([\d.]+) s  \w", text)]
        assert len(phases) > 5
        assert sum(phases) == pytest.approx(total_s, rel=0.05, abs=len(phases) * ROUNDING_S)
        began_s = psutil.Process(running.pid).create_time()
        assert total_s <= seen_s - began_s + ROUNDING_S + CLOCK_TICK_S
        info = running.http.get("/get_server_info").json()
        assert sum(info["startup_phases"].values()) == pytest.approx(info["startup_time"])
        assert info["startup_time"] == pytest.approx(total_s, rel=0.05)


@pytest.fixture
def demo_server(demo_model: Path, log: Path) -> Iterator[Server]:
    """One that nothing was asked yet."""
    with serving(log, "--model-path", "demo") as running:
        yield running


def test_memory_is_bounded_by_the_size_of_the_model(demo_model, demo_server):
    """350 MiB for the libraries of all processes, weights once and a half, pages that are used."""
    wait_until(lambda: READY_LINE in demo_server.log.read_text(), PATIENCE_S, READY_LINE)
    info = demo_server.http.get("/server_info").json()
    assert info["facts"]["memory"]["weight_bytes"] == demo_model.stat().st_size
    assert info["facts"]["memory"]["process_bytes"] > demo_model.stat().st_size
    lines = [line for line in demo_server.log.read_text().splitlines() if line.startswith("[")]
    assert len(lines) <= 10, lines
    size = f"{demo_model.stat().st_size / MIB:,.1f} MiB of weights"
    assert any("model demo: " in line and size in line for line in lines), lines
    compiled = "linear:rounded" in info["facts"]["kernels"]
    if not compiled:
        pytest.skip("without compiled kernels the weights are unpacked to floats")
    demo_server.generate(text="The capital of France is", sampling_params={"max_new_tokens": 8})
    used = sum(pss_bytes(pid) for pid in (demo_server.pid, *demo_server.members()))
    assert used <= 350 * MIB + 1.5 * demo_model.stat().st_size


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_start_that_is_stopped_while_it_compiles_leaves_nothing(
    tiny_model, tmp_path, log, monkeypatch, number, code
):
    monkeypatch.setenv("HOME", str(tmp_path))
    compiler, pids = tmp_path / "endless-c++", tmp_path / "pids"
    compiler.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ $! >> {pids}\n: > $TMPDIR/part\nwait\n")
    compiler.chmod(0o755)
    server = launch(log, "--model-path", str(tiny_model), "--cpu-compiler", str(compiler))
    try:
        wait_until(pids.exists, PATIENCE_S, "a compiler")
        wait_until(lambda: "which are being compiled" in log.read_text(), PATIENCE_S, "engine")
        os.killpg(server.pid, number)  # as a terminal sends it
        assert server.exit_code(PATIENCE_S) == code, server.tail()
    finally:
        server.kill()
    text = log.read_text()
    assert re.search(r"compiling the CPU kernels with .*, once: \d+ files, about \d+ s", text), text
    compilers = [Path("/proc", pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(map(Path.exists, compilers)), PATIENCE_S, "compilers to end")
    cache = tmp_path / ".cache/banyan/kernels"
    wait_until(lambda: not list(cache.glob("*/*/part")), PATIENCE_S, "their files to go")
    assert [p.name for p in cache.glob("*/*")] == ["lock"]
    assert "Traceback" not in log.read_text()


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided by those who share them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)[1]) * 1024


def spoil_header(folder: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header of model.safetensors; the data stays."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])
