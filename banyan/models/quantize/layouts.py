"""Target layouts of quantisation on disk: the tensors that a float weight becomes, and their
numbers.

    int8        compressed-tensors int-quantized: weight int8, weight_scale [out, 1]
    w8a16       compressed-tensors pack-quantized: weight_packed int32 [out, in/4], weight_scale,
                weight_shape
    w4a16       the same with [out, in/8] and a scale per group of inputs
    fp8         compressed-tensors float-quantized: weight e4m3, weight_scale [out, 1]
    fp8-block   the same with a scale per block of 128 × 128
    bf16, f32   floats of a folder
    q8_0 …      blocks of a GGUF file, under the tensor's own name
    f16         fp16 in a GGUF file

Also the headers of the files: sizes follow from types and shapes, so a header is written before the
tensors exist.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from banyan.formats.gguf import BLOCK_TYPES, DEFAULT_ALIGNMENT
from banyan.formats.safetensors import TYPE_BITS
from banyan.ops import rounding
from banyan.ops.rounding import TO_BLOCKS
from banyan.ops.stored import StoredWeight

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


BLOCK_SIDE = 128
_CHUNK = 1 << 24
"""Numbers that are rounded at once; limits the fp32 copy in memory."""
_GROUPS = (128, 64, 32)
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What rows take that no super-block of 256 divides; at least as many bits."""

Settings = dict[str, object]


@dataclass(frozen=True)
class Rounded:
    """How one weight is rounded.

    Attributes:
        kind: what weights of the same kind have in common: one group of the configuration.
        entries: the tensors it becomes.
        make: from the weight, a dictionary of entry name -> bytes.
    """

    kind: str
    entries: tuple[HeaderEntry, ...]
    make: Callable[[StoredWeight], dict[str, Tensor]]


class TargetLayout(Protocol):
    """One name of --type."""

    @property
    def container(self) -> str:
        """ "safetensors" or "gguf"."""
        ...

    def plan(self, name: str, shape: tuple[int, ...], type: str) -> Rounded | None:
        """What the weight `name` of a float storage type becomes, None when it does not fit."""
        ...

    def scheme(self, kind: str) -> Settings:
        """The group of `quantization_config` for weights of this kind."""
        ...


def _rows(weight: StoredWeight) -> Iterator[Tensor]:
    """The values in pieces of whole rows, [rows, inputs] fp32; a multiple of BLOCK_SIDE rows but
    for the last."""
    inputs, outputs = weight.shape[-1], math.prod(weight.shape[:-1])
    raw = weight.raw.reshape(outputs, -1)
    step = max(_CHUNK // inputs // BLOCK_SIDE, 1) * BLOCK_SIDE
    for first in range(0, outputs, step):
        piece = raw[first : first + step]
        yield StoredWeight(weight.type, (len(piece), inputs), piece).dense.float()


def _octets(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8).flatten()


def _all(weight: StoredWeight, make: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The bytes of every tensor, joined from pieces."""
    pieces: dict[str, list[Tensor]] = {}
    for rows in _rows(weight):
        for name, numbers in make(rows).items():
            pieces.setdefault(name, []).append(_octets(numbers))
    return {name: torch.cat(each) for name, each in pieces.items()}


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


@dataclass(frozen=True)
class PackedIntegers:
    """Integers of a few bits in 32-bit words.

    Attributes:
        group: inputs that share a scale, or what divides the row of 128, 64, 32; 0 = all of them.
    """

    bits: int
    group: int
    container: str = "safetensors"

    def plan(self, name: str, shape: tuple[int, ...], type: str) -> Rounded | None:
        if len(shape) != 2 or shape[1] % (32 // self.bits):
            return None
        outputs, inputs = shape
        tried = (self.group, *(size for size in _GROUPS if size < self.group))
        sizes = tried if self.group else (inputs,)
        group = next((size for size in sizes if inputs % size == 0), 0)
        if not group:
            return None
        stem, dtype = _stem(name), _DTYPES[type]
        packed, scale, whole = (f"{stem}.weight_{last}" for last in ("packed", "scale", "shape"))
        entries = (
            HeaderEntry(packed, "I32", (outputs, inputs * self.bits // 32)),
            HeaderEntry(scale, type, (outputs, inputs // group)),
            HeaderEntry(whole, "I64", (2,)),
        )

        def rows(values: Tensor) -> dict[str, Tensor]:
            levels, scales = rounding.to_integers(values, self.bits, group, dtype)
            return {packed: _words(levels, self.bits), scale: scales.to(dtype)}

        def make(weight: StoredWeight) -> dict[str, Tensor]:
            return _all(weight, rows) | {whole: _octets(torch.tensor(shape))}

        return Rounded(str(group if self.group else 0), entries, make)

    def scheme(self, kind: str) -> Settings:
        size = int(kind)
        more = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        return {
            "format": "pack-quantized",
            "weights": _args(self.bits, "int", **more),
            "input_activations": None,
        }


def _words(levels: Tensor, bits: int) -> Tensor:
    """[rows, in] int8 -> [rows, in · bits / 32] int32: half of the range added, from the lowest
    bits up."""
    octets = (levels.short() + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        octets = octets[:, ::2] | (octets[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


@dataclass(frozen=True)
class EightBits:
    """8-bit integers, or floats of 8 bits with a scale per output or per block.

    Attributes:
        type: I8 or F8_E4M3.
        side: rows and columns of a block; 0 = a scale per output.
    """

    type: str
    side: int = 0
    container: str = "safetensors"

    def plan(self, name: str, shape: tuple[int, ...], type: str) -> Rounded | None:
        if len(shape) != 2:
            return None
        scale, dtype = f"{_stem(name)}.weight_scale", _DTYPES[type]
        side = self.side
        factors = (-(-shape[0] // side), -(-shape[1] // side)) if side else (shape[0], 1)
        entries = (HeaderEntry(name, self.type, shape), HeaderEntry(scale, type, factors))

        def rows(values: Tensor) -> dict[str, Tensor]:
            if side:
                numbers, scales = rounding.to_fp8_blocks(values, side, dtype)
            elif self.type == "I8":
                numbers, scales = rounding.to_integers(values, 8, shape[1], dtype)
            else:
                numbers, scales = rounding.to_fp8(values, dtype)
            return {name: numbers, scale: scales.to(dtype)}

        return Rounded("", entries, lambda weight: _all(weight, rows))

    def scheme(self, kind: str) -> Settings:
        number = "int" if self.type == "I8" else "float"
        if self.side:
            weights = _args(8, number, strategy="block", block_structure=[self.side, self.side])
            token = {"strategy": "group", "group_size": self.side}
        else:
            weights, token = _args(8, number, strategy="channel"), {"strategy": "token"}
        return {
            "format": f"{number}-quantized",
            "weights": weights,
            "input_activations": _args(8, number, **token) | {"dynamic": True},
        }


def _args(bits: int, number: str, **more: object) -> Settings:
    return {"num_bits": bits, "type": number, "symmetric": True, "dynamic": False, **more}


@dataclass(frozen=True)
class GGUFBlocks:
    """Quantised blocks of a GGUF file.

    Attributes:
        type: a name of TO_BLOCKS.
    """

    type: str
    container: str = "gguf"

    def plan(self, name: str, shape: tuple[int, ...], type: str) -> Rounded | None:
        if len(shape) < 2:
            return None
        kinds = (self.type, _SMALLER_BLOCKS.get(self.type, self.type))
        kind = next((kind for kind in kinds if shape[-1] % TO_BLOCKS[kind][0] == 0), "")
        if not kind:
            return None

        def rows(values: Tensor) -> dict[str, Tensor]:
            return {name: rounding.to_blocks(values, kind)}

        return Rounded(kind, (HeaderEntry(name, kind, shape),), lambda weight: _all(weight, rows))

    def scheme(self, kind: str) -> Settings:
        return {}


@dataclass(frozen=True)
class Floats:
    """Floats, under the tensor's own name.

    Attributes:
        type: F16, BF16 or F32.
    """

    type: str
    container: str

    def plan(self, name: str, shape: tuple[int, ...], type: str) -> Rounded | None:
        return to_floats(name, shape, self.type) if len(shape) > 1 else None

    def scheme(self, kind: str) -> Settings:
        return {}


def to_floats(name: str, shape: tuple[int, ...], type: str) -> Rounded:
    """A weight of any storage type as floats of one."""

    def rows(values: Tensor) -> dict[str, Tensor]:
        return {name: _octets(values.to(_DTYPES[type]))}

    return Rounded(type, (HeaderEntry(name, type, shape),), lambda weight: _all(weight, rows))


def layout_of(type: str, group: int) -> TargetLayout:
    """
    Args:
        type: a name of TYPES.
        group: inputs that share a scale in w4a16.
    """
    if type.upper() in TO_BLOCKS:
        return GGUFBlocks(type.upper())
    return {
        "int8": EightBits("I8"),
        "w8a16": PackedIntegers(8, 0),
        "w4a16": PackedIntegers(4, group),
        "f16": Floats("F16", "gguf"),
        "bf16": Floats("BF16", "safetensors"),
        "f32": Floats("F32", "safetensors"),
        "fp8": EightBits("F8_E4M3"),
        "fp8-block": EightBits("F8_E4M3", BLOCK_SIDE),
    }[type]


HUB_TYPES = ("int8", "w8a16", "w4a16", "fp8", "fp8-block")
FLOAT_TYPES = ("bf16", "f32")
TYPES = (*HUB_TYPES, *FLOAT_TYPES, *(type.lower() for type in TO_BLOCKS), "f16")
