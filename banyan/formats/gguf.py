"""GGUF: one file with typed metadata, the vocabulary and block-quantized tensors.

Reads versions 2 and 3, little-endian. Every length is checked against the file before it is used.
Tensors are not dequantised here. `kept_size` gives the memory of the weights if compiled CPU
kernels keep them in blocks: types without a packed form are converted to the nearest one, which
takes up to three times the file's size (ops/cpu/csrc/linear.h).

Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Self

from banyan.base.log import printable
from banyan.formats.mapped import MAX_DIMS, MAX_TENSORS, MappedFile, TensorInfo
from banyan.formats.shards import files_of_weights

MAX_HEADER_BYTES = 1 << 29
"""Metadata and tensor table together; a vocabulary of 250,000 words needs about 10 MB."""

MAX_KEYS = 65_536
MAX_ITEMS = 4_000_000
"""Items of all arrays together; a vocabulary of 260,000 words with its scores, types and merges
has 1.3 million. In memory an item takes up to fifty times its bytes in the file."""
MAX_NAME_BYTES = 65_535
DEFAULT_ALIGNMENT = 32
SUPPORTED_VERSIONS = (2, 3)


class BlockType(NamedTuple):
    """A tensor type: elements are stored in blocks of `elements`, each of `size_bytes`."""

    name: str
    elements: int
    size_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _NUMBERS[4]
_U64 = _NUMBERS[10]


class GGUFFile(MappedFile):
    """An open GGUF file: `metadata` by key (arrays as lists) and `tensors` by name."""

    def __init__(self, path: str, is_mapped: bool = True, has_words: bool = True) -> None:
        super().__init__(path, "GGUF", is_mapped)
        self.metadata: dict[str, object] = {}
        self.num_strings: dict[str, int] = {}
        """How many each array of strings has in the file, by key."""
        self._spans: dict[str, tuple[int, int]] = {}
        self._has_words = has_words
        self._num_items = 0
        self._at = 0
        self._limit = min(self.size_bytes, MAX_HEADER_BYTES)

    @classmethod
    def open(cls, path: str, is_mapped: bool = True, has_words: bool = True) -> Self:
        """Map the file, or read it whole, and read its header.

        Args:
            has_words: False leaves arrays of strings empty: reading the vocabulary takes longer
                than everything else, and tensors do not need it.

        Raises:
            ModelError: missing, cut short, of another version, or not to be trusted.
        """
        file = cls(path, is_mapped, has_words)
        try:
            num_tensors, num_keys = file._read_counts()
            file._read_metadata(num_keys)
            file._read_tensors(num_tensors)
            file._check_layout()
        except BaseException:
            file.close()
            raise
        return file

    def _read_counts(self) -> tuple[int, int]:
        if self._map[:4] != b"GGUF":
            # The actual first bytes are not shown: the caller may not be allowed to read the file.
            raise self.error("it does not start with GGUF", "name a GGUF file")
        self._at = 4
        version = self._number(_U32)
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in SUPPORTED_VERSIONS else f"of version {version}"
            raise self.error(f"it is {what}", "convert it to little-endian GGUF version 3")
        num_tensors, num_keys = int(self._number(_U64)), int(self._number(_U64))
        if num_tensors > MAX_TENSORS:
            raise self.error(f"it claims {num_tensors:,} tensors, limit {MAX_TENSORS:,}")
        if num_keys > MAX_KEYS:
            raise self.error(f"it claims {num_keys:,} metadata keys, limit {MAX_KEYS:,}")
        return num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> None:
        for _ in range(num_keys):
            start = self._at
            key = self._string(MAX_NAME_BYTES)
            if key in self.metadata:
                raise self.error(f"metadata key {printable(key)!r} appears twice")
            self.metadata[key] = self._value(key)
            self._spans[key] = (start, self._at)

    def pairs(self) -> dict[str, bytes]:
        """The metadata by key, each with its key as it lies in the file."""
        return {key: self._map[start:end] for key, (start, end) in self._spans.items()}

    def _value(self, key: str) -> object:
        kind = int(self._number(_U32))
        if kind == _STRING:
            return self._string(MAX_HEADER_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self.error(f"metadata key {printable(key)!r} has unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str) -> list[object]:
        kind, count = int(self._number(_U32)), int(self._number(_U64))
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"an array of unknown type {kind}"
            raise self.error(f"metadata key {printable(key)!r} is {what}")
        number = _NUMBERS[kind]
        self._need(count * number.size, f"array {printable(key)!r} of {count:,} numbers")
        self._count(key, count)
        values = struct.unpack_from(f"<{count}{number.format[1:]}", self._map, self._at)
        self._at += count * number.size
        return [bool(v) for v in values] if kind == _BOOL else list(values)

    def _count(self, key: str, count: int) -> None:
        """Account for the items of an array before they are made."""
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise self.error(
                f"array {printable(key)!r} of {count:,} items brings its metadata to "
                f"{self._num_items:,} of them, limit {MAX_ITEMS:,}"
            )

    def _strings(self, key: str, count: int) -> list[object]:
        """The vocabulary reader: tight loops, because they run for several 100,000 strings."""
        self._need(8 * count, f"array {printable(key)!r} of {count:,} strings")
        self._count(key, count)
        mapped, start, limit, unpack = self._map, self._at, self._limit, _U64.unpack_from
        ends: list[int] = []
        at = start
        try:
            for _ in range(count):
                at += 8 + unpack(mapped, at)[0]
                ends.append(at)
        except (struct.error, OverflowError):
            pass  # a length itself is past the end: reported below
        if len(ends) != count or at > limit:
            good = bisect_right(ends, limit)
            raise self.error(
                f"string {good:,} of {count:,} in {printable(key)!r} runs past the end of "
                f"the header (byte {limit:,})"
            )
        self._at = at
        self.num_strings[key] = count
        if not self._has_words:
            return []
        values: list[object] = []
        try:
            for end in ends:
                values.append(mapped[start + 8 : end].decode())
                start = end
        except UnicodeDecodeError:
            raise self.error(f"string {len(values):,} of {printable(key)!r} is not UTF-8") from None
        return values

    def _read_tensors(self, num_tensors: int) -> None:
        places = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self._at // alignment) * alignment
        for name, shape, block, offset in places:
            if name in self.tensors:
                raise self.error(f"tensor {printable(name)!r} appears twice")
            if offset % alignment:
                raise self.error(
                    f"tensor {printable(name)!r} lies at offset {offset:,}, not a multiple of the "
                    f"alignment {alignment:,}"
                )
            size_bytes = math.prod(shape) // block.elements * block.size_bytes
            self.tensors[name] = TensorInfo(name, shape, block.name, start + offset, size_bytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """One entry of the tensor table: name, shape, type, offset into the tensor data."""
        name = self._string(MAX_NAME_BYTES)
        num_dims = int(self._number(_U32))
        if num_dims > MAX_DIMS:
            raise self.error(f"tensor {printable(name)!r} has {num_dims:,} dimensions")
        # The file lists the innermost dimension first.
        shape = tuple(int(self._number(_U64)) for _ in range(num_dims))[::-1]
        kind, offset = int(self._number(_U32)), int(self._number(_U64))
        block = BLOCK_TYPES.get(kind)
        if block is None:
            raise self.error(
                f"tensor {printable(name)!r} has type {kind}, which is not supported",
                f"use a file of: {', '.join(b.name for b in BLOCK_TYPES.values())}",
            )
        if 0 in shape:
            raise self.error(f"tensor {printable(name)!r} has shape {shape}, which is empty")
        row = shape[-1] if shape else 1
        if row % block.elements:
            raise self.error(
                f"tensor {printable(name)!r} has rows of {row:,}, not a multiple of the "
                f"{block.elements} elements of a {block.name} block"
            )
        return name, shape, block, offset

    def _string(self, limit: int) -> str:
        length = int(self._number(_U64))
        if length > limit:
            raise self.error(f"a string at byte {self._at:,} claims {length:,} bytes")
        self._need(length, f"a string of {length:,} bytes")
        raw = self._map[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {self._at - length:,} is not UTF-8") from None

    def _number(self, number: struct.Struct) -> int | float:
        self._need(number.size, "a number")
        (value,) = number.unpack_from(self._map, self._at)
        self._at += number.size
        return value

    def _need(self, size_bytes: int, what: str) -> None:
        if size_bytes > self._limit - self._at:
            raise self.error(
                f"{what} at byte {self._at:,} runs past the end of the header "
                f"(byte {self._limit:,})",
                "the file is cut short or damaged; download it again",
            )


KEPT_BYTES = {
    **{"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "MXFP4": 18},
    **{"Q2_K": 24, "Q3_K": 20, "Q4_K": 20, "Q5_K": 24, "Q6_K": 28},
    **{"IQ4_NL": 18, "IQ4_XS": 18, "IQ3_XXS": 18, "IQ3_S": 22, "IQ2_XXS": 20, "IQ2_XS": 20},
    **{"IQ2_S": 20, "IQ1_S": 20, "IQ1_M": 28, "TQ1_0": 18, "TQ2_0": 18},
}
"""Of 32 weights of a matrix, by the type of the file; floats stay as they are."""
_LOGGED_FROM = 1.5
"""Growth that is logged."""
_EMBEDDING = "token_embd.weight"
_MIB = 1 << 20


def kept_size(path: str) -> int:
    """Bytes of the weights of a GGUF file, or of the folder that has its parts, in memory."""
    size, has_head, embedding = 0, False, 0
    for file in files_of_weights(path):
        with GGUFFile.open(str(file), has_words=False) as opened:
            for tensor in opened.tensors.values():
                has_head |= tensor.name == "output.weight"
                kept = kept_bytes(tensor.type, tensor.shape) or tensor.size_bytes
                if tensor.name == _EMBEDDING:  # read from the file row by row
                    embedding, kept = kept, tensor.size_bytes
                size += kept
    return size + (0 if has_head else embedding)


def kept_bytes(type: str, shape: tuple[int, ...]) -> int:
    """Of one weight; 0 where it stays as it is."""
    return math.prod(shape) // 32 * KEPT_BYTES.get(type, 0) if len(shape) > 1 else 0


def growths(stored: Mapping[str, int], kept: Mapping[str, int]) -> list[str]:
    """Lines for the types that take much more memory than they do in the file."""
    grown = Counter({t: kept[t] for t in stored if kept[t] > _LOGGED_FROM * stored[t]})
    return [
        f"{type} weights are kept in {KEPT_BYTES[type] / 4:g} bits each, for which there are "
        f"kernels: {stored[type] / _MIB:,.0f} MiB of the file take {size / _MIB:,.0f} MiB"
        for type, size in grown.most_common()
    ]
