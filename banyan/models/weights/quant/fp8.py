"""8-bit floats with scales: per tensor, per output, per group of inputs, or per block of 128 × 128
(DeepSeek-V3); single weights and stacks of experts. Other formats with such numbers use it too.

The numbers keep their bits in blocks of 32 with a scale each. If no such block can hold them they
become bf16; each value is then exact except for the rounding of the scale. Where a configuration
asks for rounded activations, the weight is E4M3_DYNAMIC on devices that round them; others get a
warning. Scales that were measured for activations beforehand are not used: each token has its own.

w4afp8 (DeepSeek-R1-W4AFP8; SGLang's form of that name) has experts in 4-bit integers:
    weight int8 [out, in/2], two numbers in a byte, the first in the low half;
    weight_scale_inv [out, in/128], input_scale

Source: the `quantization_config` of deepseek-ai/DeepSeek-V3 and of transformers' FineGrainedFP8.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.log import logger
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import (
    FLOATS,
    Parts,
    Restored,
    Stored,
    numbers_of,
    part_among,
)
from banyan.models.weights.quant.groups import from_groups
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import (
    E4M3,
    E4M3_DYNAMIC,
    FLOAT8_TYPES,
    NVFP4,
    RawTensor,
    StoredWeight,
    room_for,
)

log = logger(__name__)

FLOATS_OF_8_BITS = (E4M3, E4M3_DYNAMIC)
FLOATS_OF_FEW_BITS = (*FLOATS_OF_8_BITS, NVFP4)
_SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATION_SCALES = ("input_scale", "activation_scale")
_MAX_BLOCK = 1 << 16
_NAN = 0x7F
"""The bits, but for the sign, of what is no number in e4m3."""
_EXPONENT_BIAS = 127
_MX_GROUP = 32
"""Inputs that share a scale in MXFP8 (OCP Microscaling 1.0)."""
_STACKED = 3
"""Dimensions of a stack of experts."""
_STRIP = 256
"""Rows of a weight that are brought to floats at once."""


@dataclass(frozen=True)
class Fp8:
    """Attributes:
    block: rows and columns that share a scale; None = from the scale's shape: per tensor, per
        output, or per equal group of an output's inputs.
    remark: difference from what the checkpoint asks for.
    type: storage type of what is kept, E4M3 or E4M3_DYNAMIC.
    """

    block: tuple[int, int] | None
    remark: str = ""
    type: str = E4M3

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        if type in FLOAT8_TYPES:
            return part_among(("weight", *_SCALES), name)
        return part_among((*_SCALES, *_ACTIVATION_SCALES), name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        scale = next((name for name in _SCALES if name in parts), _SCALES[0])
        factors = _factors(numbers_of(parts, scale, (*FLOATS, "F8_E8M0", "U8")))
        if "weight" in parts and len(parts["weight"].shape) == _STACKED:
            return self._stack(numbers_of(parts, "weight", FLOAT8_TYPES), factors)
        return self.of_numbers(numbers_of(parts, "weight", FLOAT8_TYPES, (None, None)), factors)

    def of_numbers(self, values: Tensor, scale: Tensor) -> Restored:
        """values: [out, in] in 8 bits; scale: fp32, as `block` says."""
        block = self._block_of(tuple(scale.shape), tuple(values.shape))
        spread = _spread(scale, tuple(values.shape), block)
        why = _misfit(values, block)
        if not why:
            return Restored(_kept(values, spread, self.type))
        found = room_for(values.shape, torch.bfloat16)
        for first in range(0, len(values), _STRIP):  # what is made in between is small
            rows = slice(first, first + _STRIP)
            found[rows] = values[rows].float() * spread(rows)
        return Restored(StoredWeight.from_tensor(found), why)

    def _stack(self, values: Tensor, scale: Tensor) -> Restored:
        """values: [experts, out, in]; scale: one for all, or one set per expert."""
        if scale.numel() > 1 and len(scale) != len(values):
            raise ModelError(f"scales of shape {list(scale.shape)} for {len(values)} experts")
        each = scale if scale.numel() > 1 else scale.reshape(1).expand(len(values))
        found = [self.of_numbers(*pair) for pair in zip(values, each, strict=True)]
        why = next((one.unpacked for one in found if one.unpacked), "")
        weights = [plain(one.weight) if why else one.weight for one in found]
        raw = torch.stack([weight.raw for weight in weights])
        return Restored(StoredWeight(weights[0].type, tuple(values.shape), raw), why)

    def _block_of(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
        outputs, inputs = shape
        if math.prod(scale) == 1:
            return shape[0], shape[1]
        if self.block is not None:
            blocks = tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))
            if scale != blocks:
                raise ModelError(
                    f"scales of shape {list(scale)}; {list(shape)} numbers in blocks of "
                    f"{list(self.block)} need {list(blocks)}"
                )
            return self.block
        groups = math.prod(scale) // outputs
        is_by_output = groups == 1 or scale[0] == outputs
        if not is_by_output or math.prod(scale) % outputs or inputs % groups:
            raise ModelError(f"a scale of shape {list(scale)} for {list(shape)} numbers")
        return 1, inputs // groups


def _factors(scale: Tensor) -> Tensor:
    """Scales in fp32; bytes are the exponents of powers of two."""
    if scale.dtype != torch.uint8:
        return scale.float()
    return torch.ldexp(torch.ones(scale.shape), scale.int() - _EXPONENT_BIAS)


def plain(weight: StoredWeight) -> StoredWeight:
    """Floats of few bits as bf16, others as they are. weight: [out, in] or [experts, out, in]"""
    if weight.type not in FLOATS_OF_FEW_BITS:
        return weight
    if len(weight.shape) == _STACKED:
        each = [plain(weight.at(index)) for index in range(weight.shape[0])]
        return StoredWeight("BF16", weight.shape, torch.stack([one.raw for one in each]))
    found = room_for(weight.shape, torch.bfloat16)
    for first in range(0, len(found), _STRIP):
        last = min(first + _STRIP, len(found))
        found[first:last] = weight.cut(0, first, last).dense
    return StoredWeight.from_tensor(found)


def with_plain_floats(
    tensors: Iterator[tuple[str, Stored]], kept: Collection[str] = ()
) -> Iterator[tuple[str, Stored]]:
    """For devices that do not multiply with floats of few bits.

    Args:
        kept: storage types with which the device multiplies.
    """
    count = 0
    for name, tensor in tensors:
        if isinstance(tensor, RawTensor) or tensor.type in kept:
            yield name, tensor
            continue
        count += tensor.type in FLOATS_OF_FEW_BITS
        yield name, plain(tensor)
    if count:
        log.info(
            "%d weights of few-bit floats became bf16, which this device multiplies with",
            count,
        )


def _misfit(values: Tensor, block: tuple[int, int]) -> str:
    """Why blocks of 32 inputs do not hold the numbers as they are; "" = they do."""
    inputs = values.shape[1]
    if values.dtype != torch.float8_e4m3fn:
        return "they are e5m2"
    if inputs % BLOCK:
        return f"{inputs} inputs are not whole blocks of {BLOCK}"
    if block[1] % BLOCK and block[1] < inputs:
        return f"scales of {block[1]} inputs are not whole blocks of {BLOCK}"
    is_odd = bool((values.view(torch.uint8) & _NAN == _NAN).any())
    return "some are not a number" if is_odd else ""


def _spread(
    scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]
) -> Callable[[slice], Tensor]:
    """Returns a function from rows to the scales of their numbers, broadcastable."""
    height, width = block
    wide = scale.reshape(-(-shape[0] // height), -1)
    of_row = torch.arange(shape[0]) // height
    if wide.shape[1] == 1:
        return lambda rows: wide[of_row[rows]]
    return lambda rows: wide[of_row[rows]].repeat_interleave(width, 1)[:, : shape[1]]


def _kept(values: Tensor, spread: Callable[[slice], Tensor], type: str) -> StoredWeight:
    """Numbers [out, in] with the scale of each block after it."""
    outputs, inputs = values.shape
    shape = (outputs, inputs // BLOCK, BLOCK + 4)
    raw = room_for(shape)
    raw[..., :BLOCK] = values.view(torch.uint8).view(*shape[:2], BLOCK)
    for first in range(0, outputs, _STRIP):
        rows = slice(first, first + _STRIP)
        wide = spread(rows).expand(len(raw[rows]), inputs)
        scales = wide[:, ::BLOCK].contiguous()
        raw[rows, :, BLOCK:] = scales.unsqueeze(-1).view(torch.uint8)
    return StoredWeight(type, (outputs, inputs), raw.flatten(1))


STATIC_REMARK = "activations are rounded with a scale of each token, not with the stored ones"


def open_rounding(facts: CheckpointFields) -> Fp8:
    """Where activations are rounded as the checkpoint asks."""
    own = open_fp8(facts)
    if not own.remark:
        return own
    is_static = facts.text("activation_scheme", default="dynamic") == "static"
    return replace(own, remark=STATIC_REMARK if is_static else "", type=E4M3_DYNAMIC)


def open_fp8(facts: CheckpointFields) -> Fp8:
    scheme = facts.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise facts.error("activation_scheme", scheme, "dynamic or static")
    remark = "activations are not rounded to 8 bits" if facts.has("activation_scheme") else ""
    if not facts.has("weight_block_size"):
        is_mx = facts.text("quant_method", default="fp8") == "mxfp8"
        return Fp8((1, _MX_GROUP) if is_mx else None, remark)
    sides = facts.listed("weight_block_size")
    good = [side for side in sides if isinstance(side, int) and 1 <= side <= _MAX_BLOCK]
    if len(sides) != 2 or len(good) != 2:
        raise facts.error("weight_block_size", sides, "two whole numbers")
    return Fp8((good[0], good[1]), remark)


_W4A_PARTS = ("weight_scale_inv", "input_scale")
_MAX_GROUP = 1 << 16
_FLOATS = Fp8((128, 128))


@dataclass(frozen=True)
class W4AFp8:
    """
    Attributes:
        group: inputs of an expert that share a scale.
    """

    group: int
    remark: str = "activations are not rounded to 8 bits as the checkpoint asks"

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("I8", *FLOAT8_TYPES)
        return part_among((*_W4A_PARTS, "weight") if is_raw else _W4A_PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "weight" in parts and parts["weight"].type in FLOAT8_TYPES:
            return _FLOATS.restore(stem, parts)
        octets = numbers_of(parts, "weight", ("I8",), (None, None))
        low, high = torch.bitwise_left_shift(octets, 4) >> 4, octets >> 4  # the sign is kept
        numbers = torch.stack([low, high], dim=-1).flatten(1)
        scale = numbers_of(parts, "weight_scale_inv", FLOATS, (None, None))
        return from_groups(numbers, 0, scale, self.group)


def open_w4afp8(facts: CheckpointFields) -> W4AFp8:
    return W4AFp8(facts.integer("group_size", 1, _MAX_GROUP, default=128))
