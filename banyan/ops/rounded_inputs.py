"""8-bit weights whose activations are to be rounded to 8 bits as well: how they lie in storage.

A block is 32 inputs: their numbers, the scale of the output, and for W8A8, whose rounding was
measured beforehand, unit and offset of the inputs. The last ones are the same all along a row, so
that rows can be cut anywhere between blocks.
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
