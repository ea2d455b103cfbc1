"""Block layouts of the IQ and TQ types, unpacked in plain torch as `blocks` does for the others.

Source: the GGUF specification (ggml-quants). An IQ type below 4 bits stores numbers of vectors from
a fixed table, and signs; the tables lie in ops/cpu/csrc/grids.inl, which compiled kernels share.

Functions named after a type: blocks [n, bytes of one block] uint8 -> [n, 256] fp32.
"""

import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from banyan.ops.blocks import IQ4_NL_LEVELS, half, nibbles

_TABLES = Path(__file__).parent / "cpu" / "csrc" / "grids.inl"
_TABLE = re.compile(r"GRID_(\w+)\[(\d+)\] = \{([\d,\s]*)\}")
_IQ2 = (8, 25, 43)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = (-1, 0, 1)
_DELTA = 0.125
"""What IQ1 adds to its vectors or takes from them, in steps."""


def iq2_xxs(blocks: Tensor) -> Tensor:
    """8 groups of 32: numbers of 4 vectors (4 bytes), then 4 × 7 signs and a 4-bit scale."""
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    word = _words(groups[..., 4:])[..., 0]  # [n, 8]
    scale = half(blocks, 0) * (0.5 + (word >> 28).float()) * 0.25
    grid = _vectors("IQ2_XXS", _IQ2, groups[..., :4].long())
    return scale.repeat_interleave(32, 1) * grid * _signs(_stored_signs(word))


def iq2_xs(blocks: Tensor) -> Tensor:
    """32 words of 9 bits for a vector and 7 for its signs, 16 scales of 4 bits."""
    both = _shorts(blocks[:, 2:66])
    grid = _vectors("IQ2_XS", _IQ2, both & 511)
    scale = _scales_of_16(half(blocks, 0), blocks[:, 66:])
    return scale * grid * _signs(_with_parity(both >> 9))


def iq2_s(blocks: Tensor) -> Tensor:
    """32 vectors: low bits (32 bytes), signs (32), high pairs (8), 16 scales of 4 bits."""
    high = _spread(blocks[:, 66:74], (0, 2, 4, 6), 3)
    grid = _vectors("IQ2_S", _IQ2, blocks[:, 2:34].long() | high << 8)
    scale = _scales_of_16(half(blocks, 0), blocks[:, 74:])
    return scale * grid * _signs(blocks[:, 34:66].long())


def iq3_xxs(blocks: Tensor) -> Tensor:
    """64 numbers of vectors of 4, then 8 words of 4 × 7 signs and a 4-bit scale."""
    word = _words(blocks[:, 66:])
    scale = half(blocks, 0) * (0.5 + (word >> 28).float()) * 0.5
    grid = _vectors("IQ3_XXS", _IQ3_XXS, blocks[:, 2:66].long())
    return scale.repeat_interleave(32, 1) * grid * _signs(_stored_signs(word))


def iq3_s(blocks: Tensor) -> Tensor:
    """64 vectors of 4: low bits (64 bytes), ninth bits (8); signs (32), 8 scales of 4 bits."""
    high = _spread(blocks[:, 66:74], tuple(range(8)), 1)
    grid = _vectors("IQ3_S", _IQ3_S, blocks[:, 2:66].long() | high << 8)
    scale = half(blocks, 0) * (1 + 2 * _spread(blocks[:, 106:], (0, 4), 15)).float()
    return scale.repeat_interleave(32, 1) * grid * _signs(blocks[:, 74:106].long())


def iq4_xs(blocks: Tensor) -> Tensor:
    """8 groups of 32 numbers of levels; 6-bit scales, high pairs (2 bytes) before low halves."""
    pairs = _shorts(blocks[:, 2:4])
    high = torch.cat([pairs >> 2 * i & 3 for i in range(8)], dim=1)
    scales = (_spread(blocks[:, 4:8], (0, 4), 15) | high << 4) - 32
    levels = torch.tensor(IQ4_NL_LEVELS, dtype=torch.float32, device=blocks.device)
    numbers = nibbles(blocks[:, 8:].reshape(-1, 16)).long().view(-1, 256)
    return (half(blocks, 0) * scales.float()).repeat_interleave(32, 1) * levels[numbers]


def iq1_s(blocks: Tensor) -> Tensor:
    """32 vectors: low bits (32 bytes); 8 words of 4 × 3 high bits, 3-bit scale, sign of delta."""
    word = _shorts(blocks[:, 34:])  # [n, 8]
    high = torch.stack([word >> 3 * i & 7 for i in range(4)], dim=2).flatten(1)
    scale = half(blocks, 0) * (2 * (word >> 12 & 7) + 1).float()
    delta = torch.where(word & 0x8000 == 0, _DELTA, -_DELTA).repeat_interleave(32, 1)
    grid = _vectors("IQ1", _IQ1, blocks[:, 2:34].long() | high << 8)
    return scale.repeat_interleave(32, 1) * (grid + delta)


def iq1_m(blocks: Tensor) -> Tensor:
    """32 vectors: low bits (32 bytes), nibbles of 3 high bits and a sign of delta (16); 4 words of
    4 × 3 bits of scales, whose highest bits are the fp16 scale of the block."""
    word = _shorts(blocks[:, 48:])  # [n, 4]
    bits = sum((word[:, i] >> 12) << 4 * i for i in range(4))
    assert isinstance(bits, Tensor)
    whole = bits.to(torch.int32).to(torch.int16).view(torch.float16).float().unsqueeze(1)
    scales = torch.stack([word >> 3 * i & 7 for i in range(4)], dim=2).flatten(1)  # [n, 16]
    high = _spread(blocks[:, 32:48], (0, 4), 15)  # [n, 32]
    delta = torch.where(high & 8 == 0, _DELTA, -_DELTA).repeat_interleave(8, 1)
    grid = _vectors("IQ1", _IQ1, blocks[:, :32].long() | (high & 7) << 8)
    return (whole * (2 * scales + 1).float()).repeat_interleave(16, 1) * (grid + delta)


def tq1_0(blocks: Tensor) -> Tensor:
    """Digits to the base of 3, five of them (the last four bytes: four) in a byte."""
    parts = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)
    shifted = [
        (blocks[:, None, start:stop] * powers[:count].view(1, -1, 1)).flatten(1)
        for start, stop, count in parts
    ]
    digits = (torch.cat(shifted, dim=1).int() * 3) >> 8
    return half(blocks, 52) * (digits - 1).float()


def tq2_0(blocks: Tensor) -> Tensor:
    """2 bits each, less one."""
    packed = blocks[:, :64].reshape(-1, 2, 1, 32)
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    return half(blocks, 64) * (((packed >> places) & 3).flatten(1).to(torch.int8) - 1).float()


@cache
def _tables() -> dict[str, list[int]]:
    text = _TABLES.read_text(encoding="ascii")
    return {
        name: [int(n) for n in words.split(",") if n.strip()]
        for name, _, words in _TABLE.findall(text)
    }


def _vectors(name: str, magnitudes: tuple[int, ...], numbers: Tensor) -> Tensor:
    """The vectors of these numbers, one after another. [n, …] -> [n, 256] fp32"""
    return _table(name, magnitudes).to(numbers.device)[numbers.long()].flatten(1)


@cache
def _table(name: str, magnitudes: tuple[int, ...]) -> Tensor:
    """[vectors, 8 or 4] fp32"""
    words = torch.tensor(_tables()[name])
    bits = 2 if len(magnitudes) == 3 else 4
    places = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(16 // bits)], dim=1)
    return torch.tensor(magnitudes, dtype=torch.float32)[places]


def _shorts(packed: Tensor) -> Tensor:
    """[n, 2 m] -> [n, m] int64, little-endian."""
    pairs = packed.long().unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 8


def _words(packed: Tensor) -> Tensor:
    """[…, 4 m] -> […, m] int64"""
    pairs = _shorts(packed).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 16


def _spread(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Numbers that share a byte, one after another. [n, m] -> [n, m · shifts] int64"""
    return torch.stack([packed.long() >> shift & mask for shift in shifts], dim=2).flatten(1)


def _scales_of_16(whole: Tensor, packed: Tensor) -> Tensor:
    """[n, 1], [n, 8] -> [n, 256]"""
    scales = _spread(packed, (0, 4), 15).float()
    return (whole * (0.5 + scales) * 0.25).repeat_interleave(16, 1)


def _stored_signs(word: Tensor) -> Tensor:
    """The 4 × 7 low bits of each word. [n, m] -> [n, 4 m], with the eighth sign."""
    return _with_parity(torch.stack([word >> 7 * i & 127 for i in range(4)], dim=2).flatten(1))


def _with_parity(seven: Tensor) -> Tensor:
    """The eighth bit makes their number even."""
    odd = sum(seven >> i & 1 for i in range(7)) & 1
    return seven | odd << 7


def _signs(octets: Tensor) -> Tensor:
    """[n, m] -> [n, 8 m] of 1 and -1"""
    return 1.0 - 2.0 * torch.stack([octets >> i & 1 for i in range(8)], dim=2).flatten(1).float()
