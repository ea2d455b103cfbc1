"""A start that cannot work ends in seconds, with an exit code of its own and the culprit named."""

import json
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.system.serving import run_to_end

LIMIT_S = 5.0
"""CPU seconds."""
PATIENCE_S = 40.0


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


def test_an_illegal_value_names_the_flag_and_the_value(log):
    output = refused(log, "--page-size", "-3")
    assert "--page-size" in output and "-3" in output


def test_a_port_in_use_is_named(tiny_model, log):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused(log, "--model-path", str(tiny_model), "--port", port)


def test_an_empty_folder_is_no_model(tmp_path, log):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(log, "--model-path", str(tmp_path / "empty"))


def test_an_unknown_architecture_is_named(copy, log):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["PebbleForSand"]}))
    assert "PebbleForSand" in refused(log, "--model-path", str(copy))


def test_a_config_that_is_not_json_is_named(copy, log):
    (copy / "config.json").write_text("{")
    assert "config.json" in refused(log, "--model-path", str(copy))


def test_a_missing_tensor_is_named(copy, log):
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors")
    assert "norm.weight" in refused(log, "--model-path", str(copy))


def test_a_tensor_that_has_no_place_is_named(copy, log):
    spoil_header(copy, lambda h: h.update({"model.form.weight": h.pop("model.norm.weight")}))
    assert "model.form.weight" in refused(log, "--model-path", str(copy))


def test_a_pickled_checkpoint_is_refused(copy, log):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert ".bin" in refused(log, "--model-path", str(copy))


def test_a_truncated_safetensors_file_is_named(copy, log):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "model.safetensors" in refused(log, "--model-path", str(copy))


def negative_offset(header: dict) -> None:
    header["lm_head.weight"]["data_offsets"][0] = -4


def beyond_the_file(header: dict) -> None:
    header["lm_head.weight"]["data_offsets"] = [1 << 40, (1 << 40) + 4]


def overlap(header: dict) -> None:
    header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]


def huge_shape(header: dict) -> None:
    header["lm_head.weight"]["shape"] = [1 << 31, 1 << 31]


def unknown_dtype(header: dict) -> None:
    header["lm_head.weight"]["dtype"] = "F1024"


@pytest.mark.parametrize(
    "spoil", [negative_offset, beyond_the_file, overlap, huge_shape, unknown_dtype]
)
def test_a_hostile_safetensors_header_is_refused(copy, log, spoil):
    spoil_header(copy, spoil)
    assert "model.safetensors" in refused(log, "--model-path", str(copy))


@pytest.mark.parametrize(
    "head",
    [b"", b"\x01", struct.pack("<Q", 1 << 60), struct.pack("<Q", 8) + b"not json"],
    ids=["empty", "one byte", "2^60 bytes of header", "not json"],
)
def test_a_safetensors_file_that_is_none_is_refused(copy, log, head):
    (copy / "model.safetensors").write_bytes(head)
    assert "model.safetensors" in refused(log, "--model-path", str(copy))


def test_a_truncated_gguf_file_is_named(demo_model, tmp_path, log):
    short = tmp_path / "short.gguf"
    with demo_model.open("rb") as file:
        short.write_bytes(file.read(20_000_000))
    assert "short.gguf" in refused(log, "--model-path", str(short))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(64),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + b"key",
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 3) + b"key" + struct.pack("<IIQ", 9, 9, 1 << 60),
    ],
    ids=["empty", "magic only", "other magic", "version", "tensors", "keys", "key", "array"],
)
def test_a_hostile_gguf_header_is_refused(tmp_path, log, head):
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(head)
    assert "hostile.gguf" in refused(log, "--model-path", str(hostile))


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
