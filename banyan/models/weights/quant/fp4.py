"""4-bit floats (e2m1), two in a byte, the first in the low half; each is a whole number of halves.

In blocks of 32 with a power of two each (MXFP4, OCP Microscaling 1.0) they are Q5_0 to the bit. In
groups of 16 with an fp8 scale, and one more for the tensor (NVFP4), they become bf16.
"""

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.models.weights.quant.base import Restored
from banyan.models.weights.quant.groups import per_block
from banyan.ops import blocks
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import StoredWeight

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
_NV_GROUP = 16
_BIAS = 127
_FP16_EXPONENTS = (-23, 15)
"""What halves of powers of two may be in fp16."""


def _halves(octets: Tensor) -> Tensor:
    """[out, in/2] uint8 -> [out, in] int8: twice the numbers."""
    table = torch.tensor(_HALVES + tuple(-each for each in _HALVES), dtype=torch.int8)
    return table[torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1).long()]


def from_mxfp4(octets: Tensor, exponents: Tensor) -> Restored:
    """octets: [out, in/2] uint8; exponents: [out, in/32] uint8, 127 for one."""
    shape = (octets.shape[0], octets.shape[1] * 2)
    if tuple(exponents.shape) != (shape[0], shape[1] // BLOCK) or shape[1] % BLOCK:
        raise ModelError(f"exponents of shape {list(exponents.shape)} for {list(shape)} numbers")
    powers = exponents.short() - _BIAS
    scale = torch.ldexp(torch.full(exponents.shape, 0.5), powers)
    lowest, highest = (int(edge) for edge in powers.aminmax())
    halves = _halves(octets)
    if lowest >= _FP16_EXPONENTS[0] and highest <= _FP16_EXPONENTS[1]:
        return per_block("Q5_0", blocks.lay_q5_0, (halves + 16).byte(), (scale.half(),), BLOCK)
    values = halves.float() * scale.repeat_interleave(BLOCK, 1)
    return Restored(StoredWeight.from_tensor(values.bfloat16()), "their scales are beyond fp16")


def from_nvfp4(octets: Tensor, scale: Tensor, factor: float) -> Restored:
    """octets: [out, in/2] uint8; scale: [out, in/16]; factor: of all scales."""
    shape = (octets.shape[0], octets.shape[1] * 2)
    if tuple(scale.shape) != (shape[0], shape[1] // _NV_GROUP):
        raise ModelError(f"scales of shape {list(scale.shape)} for {list(shape)} numbers")
    values = _halves(octets).float() * 0.5
    values *= (scale.float() * factor).repeat_interleave(_NV_GROUP, 1)
    why = f"groups of {_NV_GROUP} values are not whole blocks of {BLOCK}"
    return Restored(StoredWeight.from_tensor(values.bfloat16()), why)
