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
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from banyan.formats.headers import HeaderEntry
from banyan.ops import rounding
from banyan.ops.rounding import TO_BLOCKS
from banyan.ops.stored import StoredWeight

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
