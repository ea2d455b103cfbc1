"""Experts in 4-bit integers and other projections in 8-bit floats (DeepSeek-R1-W4AFP8).

    experts      weight int8 [out, in/2], two numbers in a byte, the first in the low half;
                 weight_scale_inv [out, in/128], input_scale
    the others   weight e4m3 [out, in], weight_scale_inv [out/128, in/128]

Source: the form w4afp8 of SGLang, and its tests.
"""

from dataclasses import dataclass

import torch

from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.models.weights.quant.fp8 import Fp8
from banyan.models.weights.quant.groups import from_groups
from banyan.ops.stored import FLOAT8_TYPES

_PARTS = ("weight_scale_inv", "input_scale")
_MAX_GROUP = 1 << 16
_FLOATS = Fp8((128, 128))


@dataclass(frozen=True)
class W4AFp8:
    """
    Attributes:
        group: inputs of an expert that share a scale.
    """

    group: int
    remark: str = "activations are not rounded to 8 bits as the checkpoint asks"

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("I8", *FLOAT8_TYPES)
        return part_among((*_PARTS, "weight") if is_raw else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "weight" in parts and parts["weight"].type in FLOAT8_TYPES:
            return _FLOATS.restore(stem, parts)
        octets = numbers_of(parts, "weight", ("I8",), (None, None))
        low, high = torch.bitwise_left_shift(octets, 4) >> 4, octets >> 4  # the sign is kept
        numbers = torch.stack([low, high], dim=-1).flatten(1)
        scale = numbers_of(parts, "weight_scale_inv", FLOATS, (None, None))
        return from_groups(numbers, 0, scale, self.group)


def open_w4afp8(facts: CheckpointFields) -> W4AFp8:
    return W4AFp8(facts.integer("group_size", 1, _MAX_GROUP, default=128))
