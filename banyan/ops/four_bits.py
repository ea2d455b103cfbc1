"""4-bit weights whose activations are to be rounded to 8 bits (modelslim's W4A8_DYNAMIC): how they
lie in storage. A block is 32 inputs: their numbers, two in a byte with the first one below, and
what they are counted in, fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FOUR_BITS = "W4A8_DYNAMIC"
BLOCK = 32
SIZE = BLOCK // 2 + 4
"""Bytes of a block."""


@dataclass(frozen=True)
class FourBits:
    """
    Attributes:
        numbers: [out, in] int8, from -8 to 7.
        scale: [out, in / 32] fp32.
    """

    numbers: Tensor
    scale: Tensor

    @property
    def raw(self) -> Tensor:
        """As it is stored. [out, bytes of a row] uint8"""
        rows, blocks = self.scale.shape
        numbers = pack(self.numbers).view(rows, blocks, BLOCK // 2)
        factors = self.scale.float().contiguous().view(torch.uint8).view(rows, blocks, 4)
        return torch.cat([numbers, factors], -1).flatten(1)

    @staticmethod
    def of(raw: Tensor) -> "FourBits":
        """raw: [out, bytes of a row] uint8"""
        rows = len(raw)
        blocks = raw.reshape(rows, -1, SIZE)
        numbers = unpacked(blocks[..., : BLOCK // 2].reshape(rows, -1))
        scale = blocks[..., BLOCK // 2 :].contiguous().view(torch.float32)
        return FourBits(numbers, scale.squeeze(-1))


def pack(numbers: Tensor) -> Tensor:
    """Two numbers along the last dimension in a byte, the first one below. [..., n] int8 ->
    [..., n / 2] uint8"""
    pairs = numbers.view(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def unpacked(packed: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2n] int8"""
    signed = packed.view(torch.int8)
    low = (signed << 4) >> 4  # which brings its sign along
    return torch.stack([low, signed >> 4], -1).flatten(-2)


def unpack(units: Tensor) -> Tensor:
    """[units, bytes of a block] uint8 -> [units, 32] fp32, the weights."""
    found = FourBits.of(units)
    return found.numbers.float() * found.scale
