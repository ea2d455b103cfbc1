"""4-bit floats (e2m1), two in a byte, the first in the low half; and mxfp4, the form of gpt-oss.

In blocks of 32 with a power of two each (MXFP4, OCP Microscaling 1.0) the numbers keep their bits.
In groups of 16 with an fp8 scale, and one more for the tensor (NVFP4), they do on devices whose
experts multiply with them; elsewhere they become bf16.

mxfp4 stores stacks of experts; the rest of the checkpoint is bf16:
    …_blocks uint8 [experts, out, in/32, 16]
    …_scales uint8 [experts, out, in/32], exponents biased by 127
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import Parts, Restored, numbers_of
from banyan.ops import blocks
from banyan.ops.blocks import BLOCK, NV_GROUP
from banyan.ops.stored import NVFP4, StoredWeight


def _codes(octets: Tensor) -> Tensor:
    """[n, bytes] uint8 -> [n, 2 · bytes] uint8: the numbers' bits."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)


def in_blocks(octets: Tensor, exponents: Tensor) -> Tensor:
    """[blocks, 16] uint8 and their exponents [blocks, 1] uint8 -> blocks of MXFP4."""
    return blocks.lay_mxfp4(_codes(octets), exponents)


def from_mxfp4(octets: Tensor, exponents: Tensor) -> Restored:
    """octets: [out, in/2] uint8; exponents: [out, in/32] uint8, 127 for one."""
    shape = (octets.shape[0], octets.shape[1] * 2)
    if tuple(exponents.shape) != (shape[0], shape[1] // BLOCK) or shape[1] % BLOCK:
        raise ModelError(f"exponents of shape {list(exponents.shape)} for {list(shape)} numbers")
    raw = in_blocks(octets.reshape(-1, BLOCK // 2), exponents.reshape(-1, 1))
    return Restored(StoredWeight("MXFP4", shape, raw.view(shape[0], -1)))


def from_nvfp4(octets: Tensor, scale: Tensor, factor: float) -> Restored:
    """octets: [out, in/2] uint8; scale: [out, in/16]; factor: of all scales."""
    shape = (octets.shape[0], octets.shape[1] * 2)
    if tuple(scale.shape) != (shape[0], shape[1] // NV_GROUP):
        raise ModelError(f"scales of shape {list(scale.shape)} for {list(shape)} numbers")
    codes = _codes(octets).view(-1, NV_GROUP)
    raw = blocks.lay_nvfp4(codes, scale.contiguous().view(-1, 1), factor)
    return Restored(StoredWeight(NVFP4, shape, raw.view(shape[0], -1)))


_PARTS = ("blocks", "scales")


@dataclass(frozen=True)
class Mxfp4:
    remark: str = ""

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        stem, _, last = name.rpartition("_")
        return (stem, last) if last in _PARTS and type == "U8" else None

    def restore(self, stem: str, parts: Parts) -> Restored:
        octets = numbers_of(parts, "blocks", ("U8",), (None, None, None, BLOCK // 2))
        exponents = numbers_of(parts, "scales", ("U8",), (None, None, None))
        if octets.shape[:-1] != exponents.shape:
            raise ModelError(
                f"blocks of shape {list(octets.shape)} need scales of shape "
                f"{list(octets.shape[:-1])}, not {list(exponents.shape)}"
            )
        experts, outputs, groups = exponents.shape
        raw = in_blocks(octets.view(-1, BLOCK // 2), exponents.view(-1, 1))
        shape = (experts, outputs, groups * BLOCK)
        return Restored(StoredWeight("MXFP4", shape, raw.view(experts, outputs, -1)))


def open_mxfp4(facts: CheckpointFields) -> Mxfp4:
    return Mxfp4()
