"""safetensors: a JSON header followed by one buffer of plain tensors.

Reads names, types, shapes and offsets; checks that the buffer is covered exactly, without holes or
overlaps, as the format asks.

Source: the format section of github.com/huggingface/safetensors.
"""

import json
import math
from typing import Self, cast

from banyan.base.json_types import unique_keys
from banyan.base.log import printable
from banyan.formats.mapped import MAX_DIMS, MAX_TENSORS, MappedFile, TensorInfo

MAX_HEADER_BYTES = 100_000_000

TYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class SafetensorsFile(MappedFile):
    """An open safetensors file: `metadata` (the optional strings) and `tensors` by name."""

    def __init__(self, path: str, is_mapped: bool = True) -> None:
        super().__init__(path, "safetensors", is_mapped)
        self.metadata: dict[str, object] = {}

    @classmethod
    def open(cls, path: str, is_mapped: bool = True) -> Self:
        """Map the file, or read it whole, and read its header.

        Raises:
            ModelError: missing, cut short, or not to be trusted.
        """
        file = cls(path, is_mapped)
        try:
            file._read_header()
            file._check_layout()
            file._check_cover()
        except BaseException:
            file.close()
            raise
        return file

    def _read_header(self) -> None:
        if self.size_bytes < 8:
            raise self.error(f"it has {self.size_bytes} bytes, less than a header")
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise self.error(
                f"its header claims {length:,} bytes, limit {MAX_HEADER_BYTES:,}",
                "name a safetensors file; this one is of another kind or damaged",
            )
        self._start = 8 + length
        if self._start > self.size_bytes:
            raise self.error(
                f"its header claims {length:,} bytes, the file has {self.size_bytes:,}",
                "the file is cut short or damaged; download it again",
            )
        entries = self._parse(self._map[8 : self._start])
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self.error("__metadata__ is not an object of strings")
        self.metadata = metadata
        if len(entries) > MAX_TENSORS:
            raise self.error(f"it names {len(entries):,} tensors, limit {MAX_TENSORS:,}")
        for name, entry in entries.items():
            self.tensors[name] = self._tensor(name, entry)

    def _parse(self, header: bytes) -> dict[str, object]:
        if header[:1] != b"{":
            raise self.error("its header is not a JSON object")
        # Parsed JSON takes up to 30 times its text, so the number of things in it is bounded first.
        for mark, most in ((b"{", 2), (b"[", 4), (b",", 16)):
            if header.count(mark) > most * MAX_TENSORS:
                raise self.error(f"its header names more than {MAX_TENSORS:,} tensors")
        try:
            entries = json.loads(
                header.decode(), object_pairs_hook=unique_keys, parse_constant=_refuse
            )
        except (ValueError, RecursionError) as error:
            raise self.error(f"its header cannot be read: {printable(str(error))}") from None
        if not isinstance(entries, dict):
            raise self.error("its header is not a JSON object")
        return entries

    def _tensor(self, name: str, entry: object) -> TensorInfo:
        label = printable(name)
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self.error(f"tensor {label!r} is not a dtype, shape and data_offsets")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in TYPE_BITS:
            raise self.error(
                f"tensor {label!r} has type {printable(repr(kind))}, which is not supported",
                f"convert it to one of: {', '.join(TYPE_BITS)}",
            )
        if not _is_lengths(shape) or len(cast(list[int], shape)) > MAX_DIMS:
            raise self.error(f"tensor {label!r} has shape {printable(repr(shape))}")
        if not _is_lengths(offsets) or len(cast(list[int], offsets)) != 2:
            raise self.error(f"tensor {label!r} has data_offsets {printable(repr(offsets))}")
        begin, end = cast(list[int], offsets)
        bits = math.prod(cast(list[int], shape)) * TYPE_BITS[kind]
        if bits % 8 or end - begin != bits // 8:
            raise self.error(
                f"tensor {label!r} of type {kind} and shape {shape} needs {-(-bits // 8):,} bytes, "
                f"its data_offsets {offsets} hold {end - begin:,}"
            )
        return TensorInfo(name, tuple(cast(list[int], shape)), kind, self._start + begin, bits // 8)

    def _check_cover(self) -> None:
        used = self._start + sum(t.size_bytes for t in self.tensors.values())
        if used != self.size_bytes:
            raise self.error(
                f"its tensors account for {used:,} bytes, the file has {self.size_bytes:,}",
                "the file is cut short, padded or damaged; download it again",
            )


def _is_lengths(values: object) -> bool:
    """Whether `values` is a list of whole numbers from 0 to 2^63 - 1 (true and false are not)."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
