"""8-bit floats with scales: one per tensor, per output, or per block of 128 × 128 (DeepSeek-V3).

The numbers stay as they are where the device multiplies with them. Else they become bf16: each
times its scale is one bf16 number but for the rounding of the scale. Activations are not rounded; a
configuration that asks for that is told so.

Source: the `quantization_config` of deepseek-ai/DeepSeek-V3 and of transformers' FineGrainedFP8.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.config.facts import Facts
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import E4M3, FLOAT8_TYPES, StoredWeight

_SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATION_SCALES = ("input_scale", "activation_scale")
_MAX_BLOCK = 1 << 16
_NAN = 0x7F
"""The bits, but for the sign, of what is no number in e4m3."""
_STRIP = 256
"""Rows of a weight that are brought to floats at once."""


@dataclass(frozen=True)
class Fp8:
    """
    Attributes:
        block: rows and columns that share a scale; None when the scale's shape tells.
        remark: what is done otherwise than the checkpoint asks.
    """

    block: tuple[int, int] | None
    remark: str = ""
    keeps: bool = False
    """Weights stay in 8 bits, where no block of 32 inputs has two scales; else they become bf16."""

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        if type in FLOAT8_TYPES:
            return part_among(("weight", *_SCALES), name)
        return part_among((*_SCALES, *_ACTIVATION_SCALES), name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        scale = next((name for name in _SCALES if name in parts), _SCALES[0])
        factors = numbers_of(parts, scale, (*FLOATS, "F8_E8M0")).float()
        values = numbers_of(parts, "weight", FLOAT8_TYPES, (None, None))
        spread = self._spread(factors, tuple(values.shape))
        if self.keeps and self._fits(values):
            return Restored(_kept(values, spread))
        found = torch.from_numpy(np.empty(values.shape, np.int16)).view(torch.bfloat16)
        for first in range(0, len(values), _STRIP):  # what is made in between is small
            rows = slice(first, first + _STRIP)
            found[rows] = values[rows].float() * spread(rows)
        return Restored(StoredWeight.from_tensor(found))

    def _fits(self, values: Tensor) -> bool:
        """Whether blocks of 32 inputs hold the numbers as they are."""
        if values.dtype != torch.float8_e4m3fn or values.shape[1] % BLOCK:
            return False
        if self.block is not None and self.block[1] % BLOCK:
            return False
        return not bool((values.view(torch.uint8) & _NAN == _NAN).any())

    def _spread(self, scale: Tensor, shape: tuple[int, ...]) -> Callable[[slice], Tensor]:
        """Gives the scales of the numbers of some rows, or what broadcasts to them."""
        if scale.numel() == 1:
            return lambda rows: scale.reshape(())
        if self.block is None:
            if scale.numel() != shape[0]:
                raise ModelError(f"a scale of shape {list(scale.shape)} for {list(shape)} numbers")
            return lambda rows: scale.reshape(-1, 1)[rows]
        blocks = tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))
        if tuple(scale.shape) != blocks:
            raise ModelError(
                f"scales of shape {list(scale.shape)}; {list(shape)} numbers in blocks of "
                f"{list(self.block)} need {list(blocks)}"
            )
        height, width = self.block
        of_row = torch.arange(shape[0]) // height
        return lambda rows: scale[of_row[rows]].repeat_interleave(width, 1)[:, : shape[1]]


def _kept(values: Tensor, spread: Callable[[slice], Tensor]) -> StoredWeight:
    """Numbers [out, in] with the scale of each block behind it."""
    outputs, inputs = values.shape
    shape = (outputs, inputs // BLOCK, BLOCK + 4)
    raw = torch.from_numpy(np.empty(shape, np.uint8))
    raw[..., :BLOCK] = values.view(torch.uint8).view(*shape[:2], BLOCK)
    for first in range(0, outputs, _STRIP):
        rows = slice(first, first + _STRIP)
        wide = spread(rows).expand(len(raw[rows]), inputs)
        scales = wide[:, ::BLOCK].contiguous()
        raw[rows, :, BLOCK:] = scales.unsqueeze(-1).view(torch.uint8)
    return StoredWeight(E4M3, (outputs, inputs), raw.flatten(1))


def open_fp8(facts: Facts) -> Fp8:
    scheme = facts.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise facts.error("activation_scheme", scheme, "dynamic or static")
    remark = "activations are not rounded to 8 bits" if facts.has("activation_scheme") else ""
    if not facts.has("weight_block_size"):
        return Fp8(None, remark)
    sides = facts.listed("weight_block_size")
    good = [side for side in sides if isinstance(side, int) and 1 <= side <= _MAX_BLOCK]
    if len(sides) != 2 or len(good) != 2:
        raise facts.error("weight_block_size", sides, "two whole numbers")
    return Fp8((good[0], good[1]), remark)
