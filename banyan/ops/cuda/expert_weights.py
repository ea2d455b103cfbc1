"""Experts' weights on a CUDA device: numbers as the checkpoint has them, and factors.

A projection of all experts is one tensor of numbers [experts, steps, outputs, CHUNK]. The numbers
of CHUNK inputs of an output are adjacent, and all outputs of a step, so that a program reads
contiguous memory. A byte of 4-bit numbers has an input of each of two chunks, the even one low.
Outputs are padded to OUTPUTS_STEP. Gates and ups take turns, so that both are at hand where their
product is.

Factors are [experts, groups of inputs, outputs or blocks of 128 of them]. Neighbours that share a
factor keep it once, if that holds for all experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from banyan.base.log import logger
from banyan.ops import blocks
from banyan.ops.blocks import BLOCK
from banyan.ops.cuda.fp8 import LEAST_CAPABILITY
from banyan.ops.cuda.needs import FP8
from banyan.ops.cuda.products import BLOCK_TYPES, OUTPUTS_STEP
from banyan.ops.rounding import to_blocks, to_fp8
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, NVFP4, STORAGE_TYPES, StoredWeight

_log = logger(__name__)
_SIDE = 128
"""Outputs that share a factor in blocks of 128 × 128."""
_MOST_BYTES = 128
"""Bytes of a chunk."""


@dataclass(frozen=True)
class Matrix:
    """One projection of one expert, before it is laid out.

    Attributes:
        numbers: [outputs, inputs] int8, or uint8 if they are floats.
        scale: [outputs, blocks of inputs] fp16, fp32, or uint8: e4m3, or exponents of powers of
            two.
        minimum: as the scale; None = none.
        unit: [outputs] fp32, multiplies the scales; None = 1.
    """

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    unit: Tensor | None = None


@dataclass(frozen=True)
class NumberType:
    """
    Attributes:
        name: as in `expert_kernels.py`.
        base: the number that means zero.
        shared: inputs that share a factor.
        take: of a weight on the device.
        of_numbers, of_scales: the type that bytes of them are.
        rounds: activations are rounded to 8-bit floats, too.
    """

    name: str
    base: int
    shared: int
    take: Callable[[StoredWeight], Matrix]
    of_numbers: torch.dtype = torch.uint8
    of_scales: torch.dtype = torch.uint8
    rounds: bool = False

    @property
    def is_paired(self) -> bool:
        return self.name in ("int4", "e2m1")


def _units_of(weight: StoredWeight) -> Tensor:
    return weight.raw.reshape(-1, STORAGE_TYPES[weight.type].size_bytes)


def _integers(type: str) -> NumberType:
    kind = BLOCK_TYPES[type]

    def take(weight: StoredWeight) -> Matrix:
        outputs, inputs = weight.shape
        levels = kind.take(_units_of(weight))
        low = None if levels.minimum is None else levels.minimum.view(outputs, -1)
        numbers = levels.numbers.view(outputs, inputs)
        return Matrix(numbers, levels.scale.view(outputs, -1), low)

    name = "int4" if kind.bits == 4 else "int8"
    of_numbers = torch.uint8 if kind.bits == 4 else torch.int8
    return NumberType(name, kind.base, kind.shared, take, of_numbers)


def _e4m3(weight: StoredWeight) -> Matrix:
    outputs, inputs = weight.shape
    raw = _units_of(weight)
    numbers = raw[:, :BLOCK].reshape(outputs, inputs)
    return Matrix(numbers, raw[:, BLOCK:].contiguous().view(torch.float32).view(outputs, -1))


def _mxfp4(weight: StoredWeight) -> Matrix:
    outputs, inputs = weight.shape
    raw = _units_of(weight)
    return Matrix(blocks.nibbles(raw[:, 1:]).view(outputs, inputs), raw[:, 0].reshape(outputs, -1))


def _nvfp4(weight: StoredWeight) -> Matrix:
    outputs, inputs = weight.shape
    raw = _units_of(weight)
    half = blocks.NV_GROUP // 2
    numbers = torch.cat([raw[:, :half] & 15, raw[:, :half] >> 4], dim=1).view(outputs, inputs)
    scale = raw[:, half].reshape(outputs, -1)
    unit = raw[:, half + 1 :].contiguous().view(torch.float32).view(outputs, -1)[:, 0]
    return Matrix(numbers, scale, unit=unit)


_FP8 = torch.float8_e4m3fn
NUMBER_TYPES = {
    **{type: _integers(type) for type in BLOCK_TYPES},
    E4M3: NumberType("e4m3", 0, BLOCK, _e4m3, _FP8),
    E4M3_DYNAMIC: NumberType("e4m3", 0, BLOCK, _e4m3, _FP8, rounds=True),
    "MXFP4": NumberType("e2m1", 0, BLOCK, _mxfp4),
    NVFP4: NumberType("e2m1", 0, blocks.NV_GROUP, _nvfp4, of_scales=_FP8),
}
"""Storage types that stay as they are; all others become floats."""


@dataclass(frozen=True)
class PackedProjection:
    """One projection of this rank's experts.

    Attributes:
        type: of its numbers; None = floats of the activations' type.
        outputs, inputs: of an expert; gates and ups are outputs of one projection.
        chunk: inputs of a chunk.
        numbers: [experts, steps, padded outputs, chunk].
        scales: [experts, groups, factors of a group]; None = numbers are floats.
        minima: as the scales; None = none.
        units: [experts, padded outputs] fp32, multiply scales; None = all 1.
        per_group: chunks of a group.
        shared: outputs that share a factor, 1 or 128; gates and ups have factors of their own.
    """

    type: NumberType | None
    outputs: int
    inputs: int
    chunk: int
    numbers: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    units: Tensor | None = None
    per_group: int = 1
    shared: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        parts = (self.numbers, self.scales, self.minima, self.units)
        return [part for part in parts if part is not None]

    @property
    def rounds(self) -> bool:
        return self.type is not None and self.type.rounds

    @property
    def has_one_scale(self) -> bool:
        """Of an output, for all its inputs, so that it may multiply the end."""
        return self.scales is None or (self.scales.shape[1] == 1 and self.minima is None)


def pack_projection(
    weights: Sequence[StoredWeight],
    dtype: torch.dtype,
    device: torch.device,
    sides: int = 1,
    rounding: str = "",
) -> PackedProjection:
    """Pack the weights [out, in] of all experts, one after another.

    Args:
        sides: 2 = rows are gates and ups in turns.
        rounding: storage type, or FP8, that floats are rounded to; "" = they are not.
    """
    kind = _kind_of(weights, rounding)
    if kind is None or not _can_read(kind, device):
        return _floats(weights, dtype, device)
    outputs, inputs = weights[0].shape
    taken = [kind.take(replace(weight, raw=weight.raw.to(device))) for weight in weights]
    factors = [part for one in taken for part in (one.scale, one.minimum) if part is not None]
    group = _group(inputs, kind.shared, factors)
    most = _MOST_BYTES // 2 if kind.is_paired else _MOST_BYTES
    chunk = max(size for size in (16, 32, 64, 128) if size <= most and group % size == 0)
    shared = _SIDE if _is_by_block(factors, sides) else 1
    steps = -(-inputs // chunk // (2 if kind.is_paired else 1))
    shape = (len(weights), steps, _filled(outputs), chunk)
    numbers = torch.zeros(shape, dtype=torch.uint8, device=device)
    for at, one in enumerate(taken):
        numbers[at, :, :outputs] = _laid(one.numbers, chunk, kind.is_paired)

    count = group // kind.shared
    scales = _factors([one.scale for one in taken], count, shared, sides)
    low = [one.minimum for one in taken if one.minimum is not None]
    minima = _factors(low, count, shared, sides) if low else None
    units = [pad_outputs(one.unit) for one in taken if one.unit is not None]
    return PackedProjection(
        kind,
        outputs,
        inputs,
        chunk,
        numbers.view(kind.of_numbers),
        scales.view(kind.of_scales) if scales.dtype == torch.uint8 else scales,
        minima,
        torch.stack(units) if units else None,
        group // chunk,
        shared,
    )


def _kind_of(weights: Sequence[StoredWeight], rounding: str) -> NumberType | None:
    """None = floats."""
    types = {weight.type for weight in weights}
    floats = () if rounding == FP8 else (E4M3, E4M3_DYNAMIC, NVFP4)
    if rounding and all(STORAGE_TYPES[type].is_float or type in floats for type in types):
        shape = weights[0].shape
        if shape[1] % BLOCK == 0:
            return _ROUNDED if rounding == FP8 else _rounded_to(rounding)
        _log.warning(
            "%d experts %s stay as they are: their inputs are no whole blocks of %d",
            len(weights),
            list(shape),
            BLOCK,
        )
    return NUMBER_TYPES.get(next(iter(types))) if len(types) == 1 else None


def _can_read(kind: NumberType, device: torch.device) -> bool:
    """Whether the device has instructions for the kind's numbers and factors."""
    if device.type != "cuda" or _FP8 not in (kind.of_numbers, kind.of_scales):
        return True
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _to_e4m3(weight: StoredWeight) -> Matrix:
    numbers, scale = to_fp8(weight.dense.float(), torch.float32)
    blocks_of_row = weight.shape[1] // BLOCK
    return Matrix(numbers.view(torch.uint8), scale.expand(-1, blocks_of_row).contiguous())


_ROUNDED = NumberType("e4m3", 0, BLOCK, _to_e4m3, _FP8, rounds=True)


def _rounded_to(type: str) -> NumberType:
    kind = NUMBER_TYPES[type]

    def take(weight: StoredWeight) -> Matrix:
        raw = to_blocks(weight.dense.float(), type)
        return kind.take(StoredWeight(type, weight.shape, raw))

    return replace(kind, take=take)


def _floats(
    weights: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device
) -> PackedProjection:
    outputs, inputs = weights[0].shape
    chunk = _MOST_BYTES // dtype.itemsize
    while chunk > 16 and -(-inputs // chunk) * chunk >= inputs + chunk // 2:
        chunk //= 2
    steps = -(-inputs // chunk)
    shape = (len(weights), steps, _filled(outputs), chunk)
    numbers = torch.zeros(shape, dtype=dtype, device=device)
    for at, weight in enumerate(weights):
        values = pad(weight.dense.to(device, dtype), (0, steps * chunk - inputs))
        numbers[at, :, :outputs] = values.view(outputs, steps, chunk).transpose(0, 1)
    return PackedProjection(None, outputs, inputs, chunk, numbers)


def pad_outputs(factors: Tensor) -> Tensor:
    """[…, outputs] with zeros up to a multiple of OUTPUTS_STEP, which programs read unmasked."""
    missing = -factors.shape[-1] % OUTPUTS_STEP
    if not missing:
        return factors
    padded = factors.new_zeros((*factors.shape[:-1], factors.shape[-1] + missing))
    padded[..., : factors.shape[-1]] = factors
    return padded


def _filled(outputs: int) -> int:
    return -(-outputs // OUTPUTS_STEP) * OUTPUTS_STEP


def _group(inputs: int, shared: int, factors: list[Tensor]) -> int:
    """The largest number of inputs that share a factor in all experts, up to all of them."""
    for group in (inputs, 128, 64, 32, 16):
        if inputs % group == 0 and group % shared == 0:
            count = group // shared
            if all(_is_shared(factor.unflatten(1, (-1, count)), 2) for factor in factors):
                return group
    return shared


def _is_shared(pieces: Tensor, dim: int) -> bool:
    """Whether all along `dim` are equal."""
    return bool((pieces == pieces.narrow(dim, 0, 1)).all())


def _is_by_block(factors: list[Tensor], sides: int) -> bool:
    """Whether blocks of 128 outputs of a side share factors [outputs, blocks of inputs]."""
    block = _SIDE * sides
    return all(
        len(factor) % block == 0 and _is_shared(factor.unflatten(0, (-1, _SIDE, sides)), 1)
        for factor in factors
    )


def _factors(factors: list[Tensor], count: int, shared: int, sides: int) -> Tensor:
    """One of each `count` blocks of inputs and `shared` outputs, of all experts: [outputs, blocks]
    each -> [experts, groups, factors of a group], in fp16 where that changes none."""
    found = torch.stack(factors)[:, :, ::count]
    if shared > 1:
        found = found.unflatten(1, (-1, shared, sides))[:, :, 0].flatten(1, 2)
    if found.dtype == torch.float32 and bool((found.half().float() == found).all()):
        found = found.half()
    found = found.transpose(1, 2)
    return (found if shared > 1 else pad_outputs(found)).contiguous()


def _laid(numbers: Tensor, chunk: int, is_paired: bool) -> Tensor:
    """[outputs, inputs] -> [steps, outputs, chunk] uint8"""
    octets = numbers.view(torch.uint8).unflatten(1, (-1, chunk)).transpose(0, 1)
    if not is_paired:
        return octets
    if len(octets) % 2:
        octets = torch.cat([octets, torch.zeros_like(octets[:1])])
    return octets[::2] | (octets[1::2] << 4)
