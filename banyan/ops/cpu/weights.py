"""Weights in the tiles of the compiled kernels, packed once at load, on all threads.

They are packed from the checkpoint's bytes, which are not needed afterwards. csrc/linear.h
describes the layout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.ops.cpu.library import Library
from banyan.ops.host_memory import Arena
from banyan.ops.stored import E4M3, STORAGE_TYPES, StoredWeight

SOURCES = (
    "F32",
    "F16",
    "BF16",
    E4M3,
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "MXFP4",
    "IQ4_XS",
    "IQ3_XXS",
    "IQ3_S",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ1_S",
    "IQ1_M",
    "TQ1_0",
    "TQ2_0",
)
"""Storage types that can be packed; the order of csrc/linear_blocks.inl."""
_EIGHT_BITS = 7
QUANTIZATIONS = {"q4_0": 0, "q4_1": 1, "q8_0": _EIGHT_BITS, "int8": _EIGHT_BITS}
"""Types that float weights may be rounded to at load -> format of csrc/linear.h."""
_BF16_PAIRS = 16
_GROUP = 16  # outputs of a tile


def is_float(type: str, quantization: str) -> bool:
    """Whether a weight of this storage type is packed as floats of at least 8 bits."""
    return (STORAGE_TYPES[type].is_float or type == E4M3) and not quantization


def rounding_of(library: Library, type: str, quantization: str) -> str:
    """The type that activations are rounded to for weights of this type: "int8" or "bf16".

    "" = there are no products with rounded activations.
    """
    if not is_float(type, quantization):
        return "int8"
    return "bf16" if type == "BF16" and library.multiplies_bf16 else ""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, inputs] in tiles.

    Attributes:
        format: of csrc/linear.h.
        tiles: uint8.
        factors: [outputs, up to a multiple of 16] fp32.
    """

    format: int
    outputs: int
    inputs: int
    tiles: Tensor
    factors: Tensor


def pack(
    library: Library,
    arena: Arena,
    weight: StoredWeight,
    quantization: str = "",
    is_head: bool = False,
    rounds: bool = False,
) -> PackedWeight:
    """Pack a weight into tiles.

    Args:
        weight: [outputs, inputs] of a type of SOURCES.
        quantization: the type that float weights are rounded to, of QUANTIZATIONS; "" = not.
        is_head: keep at least 8 bits, because logits of different tokens may be close.
        rounds: for products with rounded activations (`rounding_of`).

    Raises:
        ModelError: the weight is not a matrix.
    """
    if len(weight.shape) != 2:
        raise ModelError(f"a weight of shape {list(weight.shape)} is no matrix [out, in]")
    outputs, inputs = weight.shape
    source = SOURCES.index(weight.type)
    format = library.function("bn_linear_format")(source)
    if quantization and is_float(weight.type, ""):
        format = _EIGHT_BITS if is_head else QUANTIZATIONS[quantization]
    elif rounds and rounding_of(library, weight.type, quantization) == "bf16":
        format = _BF16_PAIRS
    tiles = arena.take(library.function("bn_linear_bytes")(format, outputs, inputs))
    factors = torch.ones(-(-outputs // _GROUP) * _GROUP)
    raw = weight.raw if weight.raw.stride(1) == 1 else weight.raw.contiguous()
    library.call(
        "bn_pack_linear",
        1,
        source,
        format,
        raw.data_ptr(),
        raw.stride(0),
        outputs,
        inputs,
        tiles.data_ptr(),
        factors.data_ptr(),
    )
    return PackedWeight(format, outputs, inputs, tiles, factors)
