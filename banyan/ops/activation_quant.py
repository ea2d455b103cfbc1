"""Weights whose activations are rounded to 8 bits as well (modelslim's W8A8, W8A8_DYNAMIC and
W4A8_DYNAMIC): how they lie in storage.

A block is 32 inputs of an output. W8A8*: the numbers, the scale of the output, and for W8A8, whose
rounding was measured beforehand, scale and offset of the inputs. These are the same all along a
row, so that rows can be cut between any blocks. W4A8_DYNAMIC: the numbers, two in a byte with the
first one in the lower half, and their fp32 scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
STATIC, DYNAMIC = "W8A8", "W8A8_DYNAMIC"
SIZES = {STATIC: BLOCK + 12, DYNAMIC: BLOCK + 4}
"""Bytes of a block."""


@dataclass(frozen=True)
class Rounding:
    """
    Attributes:
        numbers: [out, in] int8.
        scale: [out] fp32.
        unit, offset: [out] fp32, of the inputs: number = input / unit + offset; None where they are
            measured token by token.
    """

    numbers: Tensor
    scale: Tensor
    unit: Tensor | None = None
    offset: Tensor | None = None

    @property
    def raw(self) -> Tensor:
        """As it is stored. [out, bytes of a row] uint8"""
        rows, inputs = self.numbers.shape
        numbers = self.numbers.contiguous().view(torch.uint8).view(rows, inputs // BLOCK, BLOCK)
        parts = [self.scale, self.unit, self.offset]
        factors = torch.stack([part.float() for part in parts if part is not None], dim=1)
        factors = factors.contiguous().view(torch.uint8).unsqueeze(1)
        return torch.cat([numbers, factors.expand(-1, inputs // BLOCK, -1)], -1).flatten(1)

    @staticmethod
    def of(raw: Tensor, type: str) -> "Rounding":
        """What lies in a weight of `type`, STATIC or DYNAMIC. raw: [out, bytes of a row] uint8"""
        rows = len(raw)
        blocks = raw.reshape(rows, -1, SIZES[type])
        numbers = blocks[..., :BLOCK].reshape(rows, -1).contiguous().view(torch.int8)
        factors = blocks[:, 0, BLOCK:].contiguous().view(torch.float32)
        return Rounding(numbers, *(part.contiguous() for part in factors.unbind(1)))


def unpack(units: Tensor) -> Tensor:
    """[units, bytes of a block] uint8 -> [units, 32] fp32, the weights alone."""
    numbers = units[:, :BLOCK].contiguous().view(torch.int8)
    return numbers.float() * units[:, BLOCK : BLOCK + 4].contiguous().view(torch.float32)


FOUR_BITS = "W4A8_DYNAMIC"
FOUR_BIT_SIZE = BLOCK // 2 + 4
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
        numbers = pack_four_bits(self.numbers).view(rows, blocks, BLOCK // 2)
        factors = self.scale.float().contiguous().view(torch.uint8).view(rows, blocks, 4)
        return torch.cat([numbers, factors], -1).flatten(1)

    @staticmethod
    def of(raw: Tensor) -> "FourBits":
        """raw: [out, bytes of a row] uint8"""
        rows = len(raw)
        blocks = raw.reshape(rows, -1, FOUR_BIT_SIZE)
        numbers = _four_bit_numbers(blocks[..., : BLOCK // 2].reshape(rows, -1))
        scale = blocks[..., BLOCK // 2 :].contiguous().view(torch.float32)
        return FourBits(numbers, scale.squeeze(-1))


def pack_four_bits(numbers: Tensor) -> Tensor:
    """Two numbers along the last dimension in a byte, the first one below. [..., n] int8 ->
    [..., n / 2] uint8"""
    pairs = numbers.view(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _four_bit_numbers(packed: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2n] int8"""
    signed = packed.view(torch.int8)
    low = (signed << 4) >> 4  # which brings its sign along
    return torch.stack([low, signed >> 4], -1).flatten(-2)


def unpack_four_bits(units: Tensor) -> Tensor:
    """[units, bytes of a block] uint8 -> [units, 32] fp32, the weights."""
    found = FourBits.of(units)
    return found.numbers.float() * found.scale
