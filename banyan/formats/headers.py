"""Headers of checkpoint files to be written: order, type and offset of each tensor.

Sizes follow from types and shapes, so a header is written before the tensors exist.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from banyan.formats.gguf import BLOCK_TYPES, DEFAULT_ALIGNMENT
from banyan.formats.safetensors import TYPE_BITS

GGUF_VERSION = 3
_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_KINDS = {block.name: kind for kind, block in BLOCK_TYPES.items()}
_BLOCKS = {block.name: block for block in BLOCK_TYPES.values()}


class HeaderEntry(NamedTuple):
    """A tensor that is to be written, of the format's own type."""

    name: str
    type: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """Attributes:
    octets: the beginning of the file, up to the first tensor.
    offsets: first byte of every tensor in the file, in the order of the entries.
    size_bytes: of the whole file.
    """

    octets: bytes
    offsets: tuple[int, ...]
    size_bytes: int


def size_in_safetensors(entry: HeaderEntry) -> int:
    return math.prod(entry.shape) * TYPE_BITS[entry.type] // 8


def size_in_gguf(entry: HeaderEntry) -> int:
    block = _BLOCKS[entry.type]
    return math.prod(entry.shape) // block.elements * block.size_bytes


def safetensors_header(entries: Sequence[HeaderEntry]) -> Header:
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, places = 0, list[int]()
    for entry in entries:
        end = at + size_in_safetensors(entry)
        offsets = [at, end]
        listed[entry.name] = {"dtype": entry.type, "shape": entry.shape, "data_offsets": offsets}
        places.append(at)
        at = end
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    octets = len(text).to_bytes(8, "little") + text
    return Header(octets, tuple(len(octets) + place for place in places), len(octets) + at)


def gguf_header(
    pairs: Sequence[bytes], entries: Sequence[HeaderEntry], alignment: int = DEFAULT_ALIGNMENT
) -> Header:
    """Args: pairs: the metadata, each as `gguf_pair` writes it."""
    table, at, places = list[bytes](), 0, list[int]()
    for entry in entries:
        name, shape = entry.name.encode(), entry.shape[::-1]  # the innermost dimension first
        table.append(
            struct.pack("<Q", len(name))
            + name
            + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _KINDS[entry.type], at)
        )
        places.append(at)
        at += -(-size_in_gguf(entry) // alignment) * alignment
    counts = struct.pack("<IQQ", GGUF_VERSION, len(entries), len(pairs))
    octets = b"".join((b"GGUF", counts, *pairs, *table))
    octets += b"\0" * (-len(octets) % alignment)
    return Header(octets, tuple(len(octets) + place for place in places), len(octets) + at)


def gguf_pair(key: str, value: object) -> bytes:
    """A key of the metadata: whole numbers from zero up, floats, booleans, texts, and lists of one
    of them."""
    kind, octets = _value(value)
    return _text(key) + struct.pack("<I", kind) + octets


def _value(value: object) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return _BOOL, bytes([value])
    if isinstance(value, int):
        return (_U32, struct.pack("<I", value)) if value >= 0 else (_I32, struct.pack("<i", value))
    if isinstance(value, float):
        return _F32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    assert isinstance(value, list | tuple) and value, f"no metadata: {value!r}"
    items = [_value(item) for item in value]
    kinds = {kind for kind, _ in items}
    if kinds <= {_U32, _I32}:  # as gguf-py writes them
        kinds = {_I32}
        items = [(_I32, struct.pack("<i", item)) for item in value]
    assert len(kinds) == 1, "the items of an array are of one type"
    return _ARRAY, struct.pack("<IQ", kinds.pop(), len(items)) + b"".join(o for _, o in items)


def _text(text: str) -> bytes:
    octets = text.encode()
    return struct.pack("<Q", len(octets)) + octets


def without_keys(pairs: Mapping[str, bytes], *keys: str) -> list[bytes]:
    return [octets for key, octets in pairs.items() if key not in keys]
