"""Files that a flag names, of every kind that they should not be: each is refused with its name,
and none is waited for."""

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from banyan.base.errors import ConfigError, ModelError
from banyan.config.hooks import read_prompt
from banyan.formats.arrays import read_arrays, read_token_map
from banyan.moe.expert_location import read_location

Place = Callable[[str], str]
FLAG = "--speculative-token-map"


def safetensors(kind: str, shape: list[int], content: bytes = b"", cut: int = 0) -> bytes:
    entry = {"dtype": kind, "shape": shape, "data_offsets": [0, len(content)]}
    header = json.dumps({"tokens": entry}).encode()
    whole = len(header).to_bytes(8, "little") + header + content
    return whole[: len(whole) - cut]


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def saved(array: np.ndarray, is_pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=is_pickled)
    return file.getvalue()


def longs(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Path of a file of that kind."""

    def made(kind: str) -> str:
        path = tmp_path / "file"
        if kind.startswith("pipe"):
            os.mkfifo(path := path.with_suffix("." + kind.partition(".")[2]))
        elif kind.startswith("endless"):
            (path := path.with_suffix("." + kind.partition(".")[2])).symlink_to("/dev/zero")
        elif kind.startswith("loop"):
            (path := path.with_suffix("." + kind.partition(".")[2])).symlink_to(path)
        elif kind.startswith("folder"):
            (path := path.with_suffix("." + kind.partition(".")[2])).mkdir()
        elif kind.startswith("sparse"):
            with (path := path.with_suffix("." + kind.partition(".")[2])).open("wb") as file:
                file.truncate(10 << 30)
        return str(path)

    return made


KINDS = ("pipe", "endless", "loop", "folder", "sparse")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["json", "npy", "safetensors"])
def test_what_is_no_file_of_that_size_is_refused_at_once(kind: str, ending: str, place: Place):
    path = place(f"{kind}.{ending}")
    with pytest.raises(ConfigError, match=FLAG):
        read_token_map(path, FLAG)
    with pytest.raises(ConfigError, match="--init-expert-location"):
        read_location(path)
    with pytest.raises(ConfigError, match="--debug-tensor-dump-input-file"):
        read_prompt(path)


NO_NPY = {
    "empty": b"",
    "magic alone": b"\x93NUMPY",
    "cut": saved(np.arange(5))[:-8],
    "objects": saved(np.array([{}], dtype=object), is_pickled=True),
    "archive": b"PK\x03\x04" + bytes(50),
    "pickle": b"\x80\x04K\x01.",
    "larger than memory": npy("{'descr':'<i8','fortran_order':False,'shape':(100000000000,)}\n"),
    "nothing, very wide": npy(f"{{'descr':'<i8','fortran_order':False,'shape':(0,{10**20})}}\n"),
    "negative": npy("{'descr':'<i8','fortran_order':False,'shape':(-1,)}\n"),
    "half an expression": npy("{'descr':((((((\n"),
    "deep": npy("{'descr':" + "[" * 9000 + "\n"),
    "floats": saved(np.array([1.5])),
    "dates": saved(np.array(["2020"], dtype="M8[D]")),
}


@pytest.mark.parametrize("name", NO_NPY)
def test_what_numpy_stumbles_over_is_no_token_map(name: str, tmp_path: Path):
    (path := tmp_path / "map.npy").write_bytes(NO_NPY[name])
    with pytest.raises(ConfigError, match=FLAG):
        read_token_map(str(path), FLAG)


NO_JSON = [b"", b"[NaN]", b"[" * 200_000, b"[" + b"9" * 5000 + b"]", b'["\xff"]', b"[true]", b"{}"]


@pytest.mark.parametrize("content", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_list_of_whole_numbers_is_no_token_map(content: bytes, tmp_path: Path):
    (path := tmp_path / "map.json").write_bytes(content)
    with pytest.raises(ConfigError, match=FLAG):
        read_token_map(str(path), FLAG)


NO_PROMPT = {
    "cut": safetensors("I64", [4], longs(1, 2, 3, 4), cut=8),
    "negative": safetensors("I64", [1], longs(-1)),
    "beyond 31 bits": safetensors("I64", [2], longs(1, 2**31)),
    "beyond 53 bits": safetensors("I64", [2], longs(1, 2**63 - 1)),
    "floats": safetensors("F32", [1], b"\0\0\xc0\x7f"),
    "a scalar": safetensors("I64", [], longs(1)),
    "none": safetensors("I64", [0]),
    "nothing, very wide": safetensors("I64", [0, 2**62, 2**62]),
    "header of 2^63": (2**63).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("name", NO_PROMPT)
def test_what_is_no_prompt_is_refused_with_its_file(name: str, tmp_path: Path):
    (path := tmp_path / "in.safetensors").write_bytes(NO_PROMPT[name])
    with pytest.raises(ConfigError, match=r"--debug-tensor-dump-input-file.*in\.safetensors"):
        read_prompt(str(path))


def test_an_array_of_nothing_that_no_memory_could_index_is_refused(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(safetensors("I64", [0, 2**62, 2**62]))
    with pytest.raises(ModelError, match="cannot have the shape"):
        read_arrays(str(path))
