"""mxfp4, the form of gpt-oss: stacks of experts in 4-bit floats with a power of two for each 32.

    …_blocks uint8 [experts, out, in/32, 16], two numbers in a byte, the first in the low half
    …_scales uint8 [experts, out, in/32], exponents biased by 127

The rest of the checkpoint is bf16. The storage type MXFP4 holds the same numbers, in another order.
"""

from dataclasses import dataclass

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import Parts, Restored, numbers_of
from banyan.models.weights.quant.fp4 import in_blocks
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import StoredWeight

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
