"""A start that cannot work ends in seconds, with an exit code of its own and the culprit named.

`tests/cli/test_mistakes.py` makes the mistakes that need no engine; here are whole processes.
"""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from banyan.ops.cpu.build import BuildError, cached_library
from tests.system.serving import run_to_end

LIMIT_S = 5.0
"""CPU seconds."""
PATIENCE_S = 60.0


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
    assert "max-total-tokens" in output


def spoil_header(folder: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header of model.safetensors; the data stays."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])
