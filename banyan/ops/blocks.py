"""Block layouts of quantised weights, unpacked in plain torch: the reference for all kernels.

Source: the GGUF specification (ggml-quants). Every product and sum is fp32, in the same order as in
the `gguf` package, so the values are equal bit for bit.

A function named after a type unpacks blocks [n, bytes of one block] uint8 to [n, values of one
block] fp32. Functions named lay_… make such blocks.
"""

import torch
from torch import Tensor

BLOCK = 32
"""Values per block of the simple types."""

SUPER_BLOCK = 256
"""Values per block of the K types, which hold 8 or 16 groups with scales of their own."""

NV_GROUP = 16
"""Values per block of NVFP4."""
E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the 4-bit floats."""
IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at byte `start` of each block, as fp32. [n, 1]"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, 16] -> [n, 32]: low halves are values 0…15, high halves 16…31."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _bits(packed: Tensor) -> Tensor:
    """[n, 4] -> [n, 32]: bit i of the little-endian word belongs to value i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def fifths(bits: Tensor, packed: Tensor) -> Tensor:
    """Numbers of 5 bits: [n, 4] their highest bits and [n, 16] as for `nibbles` -> [n, 32]"""
    return nibbles(packed) | (_bits(bits) << 4)


def q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).to(torch.int8) - 8).float()


def q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:]).float() + half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    quants = fifths(blocks[:, 2:6], blocks[:, 6:])
    return half(blocks, 0) * (quants.to(torch.int8) - 16).float()


def q5_1(blocks: Tensor) -> Tensor:
    quants = fifths(blocks[:, 4:8], blocks[:, 8:])
    return half(blocks, 0) * quants.float() + half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * half(blocks, 0)


def iq4_nl(blocks: Tensor) -> Tensor:
    levels = torch.tensor(IQ4_NL_LEVELS, dtype=torch.float32, device=blocks.device)
    return half(blocks, 0) * levels[nibbles(blocks[:, 2:]).long()]


def mxfp4(blocks: Tensor) -> Tensor:
    """A power of two, its exponent biased by 127, and 32 4-bit floats (OCP Microscaling 1.0)."""
    levels = torch.tensor(E2M1_HALVES, dtype=torch.float32, device=blocks.device)
    exponents = blocks[:, :1].int() - 128
    half = torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)
    return half * levels[nibbles(blocks[:, 1:]).long()]


def nvfp4(blocks: Tensor) -> Tensor:
    """16 4-bit floats, their e4m3 scale, and an fp32 factor of all scales of the tensor."""
    levels = torch.tensor(E2M1_HALVES, dtype=torch.float32, device=blocks.device) * 0.5
    codes = torch.cat([blocks[:, :8] & 15, blocks[:, :8] >> 4], dim=1)
    scale = blocks[:, 8:9].contiguous().view(torch.float8_e4m3fn).float()
    return levels[codes.long()] * (scale * blocks[:, 9:].contiguous().view(torch.float32))


def lay_nvfp4(codes: Tensor, scale: Tensor, factor: float) -> Tensor:
    """[n, 16] numbers of 4-bit floats, e4m3 scales [n, 1] and their factor -> blocks [n, 13]."""
    factors = torch.full((len(codes), 1), factor, dtype=torch.float32).view(torch.uint8)
    return torch.cat([codes[:, :8] | codes[:, 8:] << 4, scale.view(torch.uint8), factors], dim=1)


def lay_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """[n, 32] numbers of 4-bit floats and biased exponents [n, 1] uint8 -> blocks [n, 17]."""
    return torch.cat([exponents, _halves(codes)], dim=1)


def lay_q4_0(levels: Tensor, scale: Tensor) -> Tensor:
    """[n, 32] numbers 0…15, 8 of them for zero, and fp16 scales [n, 1] -> blocks [n, 18]."""
    return torch.cat([_octets(scale), _halves(levels)], dim=1)


def lay_q4_1(levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[n, 32] numbers 0…15, fp16 scales and minima [n, 1] -> blocks [n, 20]."""
    return torch.cat([_octets(scale), _octets(minimum), _halves(levels)], dim=1)


def lay_q8_0(levels: Tensor, scale: Tensor) -> Tensor:
    """[n, 32] int8 and fp16 scales [n, 1] -> blocks [n, 34]."""
    return torch.cat([_octets(scale), levels.contiguous().view(torch.uint8)], dim=1)


def lay_q5_0(levels: Tensor, scale: Tensor) -> Tensor:
    """[n, 32] numbers 0…31, 16 of them for zero, and fp16 scales [n, 1] -> blocks [n, 22]."""
    return torch.cat([_octets(scale), _fifths(levels), _halves(levels & 15)], dim=1)


def lay_q5_1(levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[n, 32] numbers 0…31, fp16 scales and minima [n, 1] -> blocks [n, 24]."""
    parts = [_octets(scale), _octets(minimum), _fifths(levels), _halves(levels & 15)]
    return torch.cat(parts, dim=1)


def lay_q4_k(
    levels: Tensor, scales: Tensor, minima: Tensor, unit: Tensor, minimum_unit: Tensor
) -> Tensor:
    """[n, 8, 32] numbers 0…15, [n, 8] of 6 bits each, fp16 [n, 1] that these are counted in ->
    blocks [n, 144]."""
    pairs = levels.view(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    return torch.cat([_octets(unit), _octets(minimum_unit), _sixes(scales, minima), low], dim=1)


def lay_q5_k(
    levels: Tensor, scales: Tensor, minima: Tensor, unit: Tensor, minimum_unit: Tensor
) -> Tensor:
    """As `lay_q4_k`, of numbers 0…31 -> blocks [n, 176]."""
    worth = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8).view(1, 8, 1)
    high = ((levels >> 4) * worth).sum(1, dtype=torch.uint8)
    low = lay_q4_k(levels & 15, scales, minima, unit, minimum_unit)
    return torch.cat([low[:, :16], high, low[:, 16:]], dim=1)


def lay_q6_k(levels: Tensor, scales: Tensor, unit: Tensor) -> Tensor:
    """[n, 256] numbers 0…63, 32 of them for zero, [n, 16] int8, fp16 [n, 1] that these are counted
    in -> blocks [n, 210]."""
    halves = (levels & 15).view(-1, 2, 2, 64)
    low = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    quarters = (levels >> 4).view(-1, 2, 4, 32)
    high = sum(
        (quarters[:, :, i] << (2 * i) for i in range(4)), torch.zeros_like(quarters[:, :, 0])
    )
    octets = scales.contiguous().view(torch.uint8)
    return torch.cat([low, high.flatten(1), octets, _octets(unit)], dim=1)


def _sixes(scales: Tensor, minima: Tensor) -> Tensor:
    """[n, 8] scales and minima of 6 bits -> the 12 bytes that `_q4_k_scales` takes apart."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return torch.cat([first, second, third], dim=1)


def _fifths(levels: Tensor) -> Tensor:
    """[n, 32] -> [n, 4]: the fifth bit of each number, which `_bits` takes apart."""
    worth = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return ((levels >> 4).view(-1, 4, 8) * worth).sum(2, dtype=torch.uint8)


def _octets(numbers: Tensor) -> Tensor:
    """[n, 1] fp16 -> [n, 2]"""
    return numbers.contiguous().view(torch.uint8)


def _halves(levels: Tensor) -> Tensor:
    """[n, 32] -> [n, 16]: what `nibbles` takes apart."""
    return levels[:, :16] | (levels[:, 16:] << 4)


def q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 values: 4-bit scale and minimum (16 bytes), 2-bit values (64), d, dmin."""
    packed = blocks[:, :16]
    scale = half(blocks, 80) * (packed & 15).float()  # [n, 16]
    minimum = half(blocks, 82) * (packed >> 4).float()
    quants = _planes(blocks[:, 16:80], 32, (0, 2, 4, 6), 3).view(-1, 16, 16)
    return (scale.unsqueeze(-1) * quants.float() - minimum.unsqueeze(-1)).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 values: high bits (32 bytes), low 2 bits (64), 6-bit scales (12), d."""
    scale = half(blocks, 108) * (_q3_k_scales(blocks[:, 96:108]) - 32).float()  # [n, 16]
    low = _planes(blocks[:, 32:96], 32, (0, 2, 4, 6), 3).to(torch.int8)
    high = _planes(blocks[:, :32], 32, tuple(range(8)), 1).to(torch.int8)
    quants = (low - ((high ^ 1) << 2)).view(-1, 16, 16)  # a clear high bit takes 4 away
    return (scale.unsqueeze(-1) * quants.float()).flatten(1)


Counted = tuple[Tensor, Tensor, Tensor | None]
"""Numbers [n, groups, values], what they are counted in and perhaps what is added, [n, groups, 1]
fp32."""


def counted_q4_k(blocks: Tensor) -> Counted:
    """8 groups of 32 values: d, dmin, 6-bit scales and minima (12 bytes), 4-bit values (128)."""
    scale, minimum = _q4_k_scales(blocks)  # [n, 8, 1]
    return _planes(blocks[:, 16:144], 32, (0, 4), 15).view(-1, 8, 32), scale, -minimum


def counted_q5_k(blocks: Tensor) -> Counted:
    """As Q4_K, with the fifth bits (32 bytes) before the low four (128)."""
    scale, minimum = _q4_k_scales(blocks)
    low = _planes(blocks[:, 48:176], 32, (0, 4), 15)
    high = _planes(blocks[:, 16:48], 32, tuple(range(8)), 1)
    return (low | (high << 4)).view(-1, 8, 32), scale, -minimum


def counted_q6_k(blocks: Tensor) -> Counted:
    """16 groups of 16 values: low 4 bits (128 bytes), high 2 bits (64), int8 scales (16), d."""
    scale = half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    low = _planes(blocks[:, :128], 64, (0, 4), 15)
    high = _planes(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    quants = (low | (high << 4)).to(torch.int8) - 32
    return quants.view(-1, 16, 16), scale.unsqueeze(-1), None


def q4_k(blocks: Tensor) -> Tensor:
    return _together(*counted_q4_k(blocks))


def q5_k(blocks: Tensor) -> Tensor:
    return _together(*counted_q5_k(blocks))


def q6_k(blocks: Tensor) -> Tensor:
    return _together(*counted_q6_k(blocks))


def _together(quants: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    values = scale * quants.float()
    return (values if minimum is None else values + minimum).flatten(1)


def _planes(packed: Tensor, run: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Values that share bytes: each run of bytes holds one run of values per shift.

    packed: [n, bytes]; returns [n, bytes · len(shifts)] uint8.
    """
    places = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return ((packed.reshape(packed.shape[0], -1, 1, run) >> places) & mask).flatten(1)


def _q3_k_scales(packed: Tensor) -> Tensor:
    """12 bytes -> 16 numbers of 6 bits: 8 bytes of nibbles, then 4 bytes of the high pairs."""
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    high = _planes(packed[:, 8:], 4, (0, 2, 4, 6), 3)
    return (low | (high << 4)).to(torch.int8)


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups, d and dmin multiplied in. [n, 8, 1] each

    Of the 12 bytes at 4, the first four hold 6 bits of scales 0…3, the next four 6 bits of minima
    0…3; their free high pairs top up the nibbles of the last four: scales (low), minima (high) 4…7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    scale, minimum = half(blocks, 0) * scales.float(), half(blocks, 2) * minima.float()
    return scale.unsqueeze(-1), minimum.unsqueeze(-1)


def e4m3(units: Tensor) -> Tensor:
    """[units, 36] uint8, numbers and then their scale -> [units, 32] fp32."""
    numbers = units[:, :BLOCK].contiguous().view(torch.float8_e4m3fn)
    return numbers.float() * units[:, BLOCK:].contiguous().view(torch.float32)
