"""Layout of quantised weights on CUDA: numbers, and their factors in tensors of their own.

The inputs are cut into chunks that share a factor. All outputs of a chunk are adjacent, so a thread
block reads contiguous memory. A byte of 4-bit numbers has two chunks: the even one low, the odd one
high.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops import blocks
from banyan.ops.stored import STORAGE_TYPES, StoredWeight

OUTPUTS_STEP = 128
"""Outputs are padded to a multiple of this, so that reads of weights need no mask."""
_CHUNKS = (128, 64, 32, 16)
_MOST_PAIRED = 64
"""Most inputs of a chunk of 4-bit numbers; two chunks are read together."""
_MOST_BYTES = 1 << 28
"""Bytes of a weight that are unpacked at once."""


@dataclass(frozen=True)
class Levels:
    """Unpacked blocks: value = number · scale + minimum.

    Attributes:
        numbers: [n, inputs that share a scale] int8; 4-bit ones are 0…15.
        scale: [n] fp16 or fp32.
        minimum: as the scale; None = none.
    """

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None = None


@dataclass(frozen=True)
class PackedBlockType:
    """
    Attributes:
        bits: bits of a number in memory, 4 or 8.
        base: the number that means zero.
        shared: inputs that share a scale.
        take: [blocks, bytes of one] uint8 -> Levels.
    """

    bits: int
    base: int
    shared: int
    take: Callable[[Tensor], Levels]


def _half(raw: Tensor, start: int) -> Tensor:
    return raw[:, start : start + 2].contiguous().view(torch.float16).view(-1)


def _q8_0(raw: Tensor) -> Levels:
    return Levels(raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0))


def _q4_0(raw: Tensor) -> Levels:
    return Levels(blocks.nibbles(raw[:, 2:]).view(torch.int8), _half(raw, 0))


def _q4_1(raw: Tensor) -> Levels:
    numbers = blocks.nibbles(raw[:, 4:]).view(torch.int8)
    return Levels(numbers, _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Levels:
    return Levels(blocks.fifths(raw[:, 2:6], raw[:, 6:]).view(torch.int8) - 16, _half(raw, 0))


def _q5_1(raw: Tensor) -> Levels:
    numbers = blocks.fifths(raw[:, 4:8], raw[:, 8:]).view(torch.int8)
    return Levels(numbers, _half(raw, 0), _half(raw, 2))


def _iq4_nl(raw: Tensor) -> Levels:
    levels = torch.tensor(blocks.IQ4_NL_LEVELS, dtype=torch.int8, device=raw.device)
    return Levels(levels[blocks.nibbles(raw[:, 2:]).int()], _half(raw, 0))


def _counted(levels: blocks.Counted) -> Levels:
    numbers, scale, minimum = levels
    low = None if minimum is None else minimum.reshape(-1)
    return Levels(numbers.to(torch.int8).flatten(0, 1), scale.reshape(-1), low)


BLOCK_TYPES = {
    "Q8_0": PackedBlockType(8, 0, 32, _q8_0),
    "Q4_0": PackedBlockType(4, 8, 32, _q4_0),
    "Q4_1": PackedBlockType(4, 0, 32, _q4_1),
    "Q5_0": PackedBlockType(8, 0, 32, _q5_0),
    "Q5_1": PackedBlockType(8, 0, 32, _q5_1),
    "IQ4_NL": PackedBlockType(8, 0, 32, _iq4_nl),
    "Q4_K": PackedBlockType(4, 0, 32, lambda raw: _counted(blocks.counted_q4_k(raw))),
    "Q5_K": PackedBlockType(8, 0, 32, lambda raw: _counted(blocks.counted_q5_k(raw))),
    "Q6_K": PackedBlockType(8, 0, 16, lambda raw: _counted(blocks.counted_q6_k(raw))),
}
"""Storage types that stay quantised."""


@dataclass(frozen=True)
class PackedNumbers:
    """A weight [outputs, inputs] on the device.

    Attributes:
        bits, base: as in `PackedBlockType`.
        group: inputs that share a factor, a multiple of the chunk.
        numbers: [chunks, padded outputs, inputs of a chunk] int8, or [chunks/2, …] uint8 for 4
            bits.
        scales: [groups, padded outputs] fp16.
        minima: as the scales; None = none.
        units: [padded outputs] fp32, powers of two that multiply scales and minima; None = all 1.
    """

    bits: int
    base: int
    outputs: int
    inputs: int
    group: int
    numbers: Tensor
    scales: Tensor
    minima: Tensor | None
    units: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        parts = (self.numbers, self.scales, self.minima, self.units)
        return sum(part.nbytes for part in parts if part is not None)


def pack(weight: StoredWeight, device: torch.device) -> PackedNumbers:
    """Pack a weight [outputs, inputs] of BLOCK_TYPES. Factors that neighbours share are kept once:
    per group of 128, 64 or 32 inputs, or per output. Factors with more than 11 bits are rounded to
    11."""
    kind = BLOCK_TYPES[weight.type]
    outputs, inputs = weight.shape
    step = max(OUTPUTS_STEP, _MOST_BYTES // (inputs * 4) // OUTPUTS_STEP * OUTPUTS_STEP)
    size = STORAGE_TYPES[weight.type].size_bytes
    taken = [
        kind.take(weight.raw[first : first + step].to(device).reshape(-1, size))
        for first in range(0, outputs, step)
    ]
    scale = torch.cat([part.scale for part in taken]).view(outputs, -1)
    lows = [part.minimum for part in taken if part.minimum is not None]
    minimum = torch.cat(lows).view(outputs, -1) if lows else None
    units = None if scale.dtype == torch.float16 else _units(scale, minimum)
    if units is not None:
        scale = (scale / units[:outputs, None]).half()
        minimum = None if minimum is None else (minimum / units[:outputs, None]).half()
    group = _group(inputs, kind.shared, scale, minimum)
    most = _MOST_PAIRED if kind.bits == 4 else _CHUNKS[0]
    chunk = next(size for size in _CHUNKS if size <= most and group % size == 0)
    pieces = [_lay(part.numbers.view(-1, inputs), kind.bits, chunk) for part in taken]
    numbers = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
    scales = _factors(scale, group // kind.shared)
    minima = None if minimum is None else _factors(minimum, group // kind.shared)
    return PackedNumbers(
        kind.bits, kind.base, outputs, inputs, group, numbers, scales, minima, units
    )


def _units(scale: Tensor, minimum: Tensor | None) -> Tensor:
    """Powers of two that bring the largest factor of a row to 2^14 … 2^15. Factors are [outputs,
    groups] fp32; returns [padded outputs]."""
    largest = scale.abs().amax(1)
    if minimum is not None:
        largest = torch.maximum(largest, minimum.abs().amax(1))
    _, exponents = torch.frexp(largest)
    units = torch.ldexp(torch.ones_like(largest), exponents - 15)
    return _filled(torch.where(largest > 0, units, 1.0), 0)


def _group(inputs: int, shared: int, *factors: Tensor | None) -> int:
    """The largest group of inputs with equal factors: all inputs, or one of _CHUNKS. Factors are
    [outputs, blocks of `shared` inputs]."""
    for group in (inputs, *_CHUNKS):
        if inputs % group == 0 and all(
            factor is None or _is_shared(factor, group // shared) for factor in factors
        ):
            return group
    raise AssertionError(f"{inputs} inputs are no blocks of {_CHUNKS[-1]}")


def _is_shared(factor: Tensor, count: int) -> bool:
    pieces = factor.view(len(factor), -1, count)
    return bool((pieces == pieces[..., :1]).all())


def _factors(factor: Tensor, count: int) -> Tensor:
    """Every `count`-th factor: [outputs, blocks] -> [groups, padded outputs]."""
    return _filled(factor[:, ::count].t(), 1).contiguous()


def _lay(numbers: Tensor, bits: int, chunk: int) -> Tensor:
    """[outputs, inputs] int8 -> `PackedNumbers.numbers`."""
    outputs = numbers.shape[0]
    tiles = _filled(numbers.view(outputs, -1, chunk).transpose(0, 1), 1)
    if bits == 8:
        return tiles.contiguous()
    octets = tiles.contiguous().view(torch.uint8)
    if len(octets) % 2:
        octets = functional.pad(octets, (0, 0, 0, 0, 0, 1))
    return octets[::2] | (octets[1::2] << 4)


def _filled(tensor: Tensor, dim: int) -> Tensor:
    """Pad with zeros to the next multiple of OUTPUTS_STEP along `dim`."""
    missing = -tensor.shape[dim] % OUTPUTS_STEP
    pads = [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]
    return functional.pad(tensor, pads) if missing else tensor
