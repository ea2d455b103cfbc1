"""Reading ahead: the system is asked for the weights, and for no more than is worth it."""

import json
import os
from pathlib import Path

import pytest

from banyan.formats import shards
from banyan.formats.shards import read_ahead, size_of_weights


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """File name -> bytes of it that the system was asked for, all from its start on."""
    found: dict[str, int] = {}

    def record(fd: int, at: int, size: int, advice: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        assert at == found.get(name, 0) and advice == os.POSIX_FADV_WILLNEED
        found[name] = at + size

    monkeypatch.setattr(os, "posix_fadvise", record)
    monkeypatch.setattr(shards, "_PIECE_BYTES", 10)
    return found


def test_a_file_is_asked_for_whole(asked: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(95))
    read_ahead(str(tmp_path / "model.gguf"))
    assert asked == {"model.gguf": 100}


def test_shards_are_asked_for_in_order_up_to_the_bound(
    asked: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(100))
    order = {"x": "b.safetensors", "y": "a.safetensors", "z": "c.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": order}))
    monkeypatch.setattr(shards, "_AHEAD_BYTES", 150)
    read_ahead(str(tmp_path))
    assert asked == {"b.safetensors": 100, "a.safetensors": 50}


def test_weights_are_as_large_as_their_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(95))
    assert size_of_weights(str(tmp_path / "model.gguf")) == 95
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(100))
    assert size_of_weights(str(tmp_path)) == 200


def test_what_is_not_there_is_left_to_the_reader(tmp_path: Path) -> None:
    read_ahead(str(tmp_path))
    read_ahead(str(tmp_path / "missing.gguf"))
