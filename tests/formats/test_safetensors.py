"""safetensors headers: what a good file says, and a ModelError for every bad one."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from banyan.base.errors import ModelError
from banyan.formats.mapped import MAX_TENSORS
from banyan.formats.safetensors import SafetensorsFile


def build(header: object, payload: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(payload)


def entry(
    kind: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


def opened(tmp_path: Path, raw: bytes) -> SafetensorsFile:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return SafetensorsFile.open(str(path))


def test_a_file_of_the_format_s_own_package_reads_back(tmp_path: Path) -> None:
    arrays = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "h": np.arange(4, dtype=np.float16),
        "i": np.arange(5, dtype=np.int8),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }
    path = str(tmp_path / "model.safetensors")
    save_file(arrays, path, metadata={"format": "np"})
    with SafetensorsFile.open(path) as file:
        assert file.metadata == {"format": "np"}
        assert {n: t.type for n, t in file.tensors.items()} == {
            "f": "F32",
            "h": "F16",
            "i": "I8",
            "scalar": "I64",
            "empty": "F32",
        }
        for name, array in arrays.items():
            assert file.tensors[name].shape == array.shape
            assert bytes(file.bytes_of(name)) == array.tobytes()


def test_spaces_after_the_header_are_legal(tmp_path: Path) -> None:
    raw = json.dumps({"t": entry("F8_E4M3", [8])}).encode() + b"   "
    with opened(tmp_path, build(raw, 8)) as file:
        assert file.tensors["t"].size_bytes == 8


HOSTILE = {
    "less than a header": b"\x02\x00",
    f"claims {1 << 60:,} bytes": build({}, length=1 << 60),
    "claims 100,000,001 bytes": build({}, length=100_000_001),
    "claims 500 bytes": build({}, length=500),
    "not a JSON object": build(b"[1]"),
    "cannot be read": build(b'{"t":'),
    "is not JSON": build(b'{"t": NaN}'),
    "'utf-8' codec": build(b'{"\xff": 1}'),
    "recursion": build(b'{"t":' + b"[" * 100_000),
    "'t' appears twice": build(b'{"t": 1, "t": 2}'),
    "__metadata__": build({"__metadata__": {"a": 1}}),
    f"more than {MAX_TENSORS:,} tensors": build(b"{" + b'"":{},' * 1_000_000 + b"}"),
    "not a dtype, shape and data_offsets": build({"t": {"dtype": "F32"}}),
    "type 'F31'": build({"t": entry("F31")}, 8),
    "type ['F32']": build({"t": entry(["F32"])}, 8),
    "shape [-2]": build({"t": entry(shape=[-2])}, 8),
    "shape [2.0]": build({"t": entry(shape=[2.0])}, 8),
    "shape [true]": build({"t": entry(shape=[True])}, 8),
    "shape 'x'": build({"t": entry(shape="x")}, 8),
    "shape [1, 1, 1": build({"t": entry(shape=[1] * 9)}, 8),
    "data_offsets [8, 0]": build({"t": entry(offsets=[8, 0])}, 8),
    "data_offsets [0, 8, 9]": build({"t": entry(offsets=[0, 8, 9])}, 8),
    "needs 12": build({"t": entry(shape=[3])}, 8),
    "needs 1,208,925,819,614,629,174,706,176": build({"t": entry("I8", [1 << 40, 1 << 40])}, 8),
    "ends at byte": build({"t": entry(offsets=[1 << 40, (1 << 40) + 8])}, 8),
    "'s' and 't' overlap": build({"s": entry(), "t": entry(offsets=[4, 12])}, 12),
    "account for": build({"t": entry(offsets=[4, 12])}, 12),
    "the file has": build({"t": entry()}, 99),
}


@pytest.mark.parametrize("says", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        opened(tmp_path, HOSTILE[says])
    assert "model.safetensors" in str(error.value) and error.value.hint
    assert says.lower() in str(error.value).lower()


GOOD = build({"a": entry(), "b": entry("BF16", [2, 3], [8, 20])}, 20)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, GOOD).close()
    for length in range(len(GOOD)):
        with pytest.raises(ModelError):
            opened(tmp_path, GOOD[:length])


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_random_damage_is_read_or_refused_and_nothing_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        with opened(tmp_path_factory.getbasetemp(), bytes(raw)) as file:
            for name, found in file.tensors.items():
                assert file.bytes_of(name).nbytes == found.size_bytes
    except ModelError:
        pass


def test_a_file_that_is_read_whole_equals_a_mapped_one(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({"f": np.arange(6, dtype=np.float32)}, path)

    with SafetensorsFile.open(path, is_mapped=False) as file:
        raw = bytes(file.bytes_of("f"))
        Path(path).write_bytes(b"")

        assert raw == bytes(file.bytes_of("f")) == np.arange(6, dtype=np.float32).tobytes()
        assert file.bytes_of("f").readonly
