"""8-bit integers with one scale per output, the form that w8a8_int8 names.

    weight int8 [out, in], weight_scale [out, 1]

The numbers become Q8_0, the scale repeated in every block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import (
    FLOATS,
    INTEGERS,
    Parts,
    Restored,
    numbers_of,
    part_among,
)
from banyan.models.weights.quant.groups import from_groups
from banyan.ops.activation_quant import BLOCK, DYNAMIC, Rounding
from banyan.ops.stored import StoredWeight

_PARTS = ("weight_scale", "weight_offset", "weight_zero_point", "input_scale", "input_zero_point")
_ZEROS = ("weight_offset", "weight_zero_point")


@dataclass(frozen=True)
class Int8:
    remark: str = "activations are not rounded to 8 bits as the checkpoint asks"
    keeps_rounding: bool = False

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among((*_PARTS, "weight") if type == "I8" else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        found = by_output(parts)
        return found if not self.keeps_rounding or found.weight.shape[1] % BLOCK else rounded(parts)


def rounded(parts: Parts, type: str = DYNAMIC, units: Sequence[Tensor] = ()) -> Restored:
    """The weight with what rounding its inputs needs, once `by_output` has found nothing amiss.

    Args:
        units: unit and offset of the inputs, [1] each, where they were measured beforehand.
    """
    numbers = numbers_of(parts, "weight", ("I8",), (None, None))
    outputs = len(numbers)
    scale = numbers_of(parts, "weight_scale", FLOATS).float().flatten().expand(outputs)
    each = [unit.float().expand(outputs) for unit in units]
    raw = Rounding(numbers, scale, *each).raw
    return Restored(StoredWeight(type, tuple(numbers.shape), raw))


def by_output(parts: Parts) -> Restored:
    numbers = numbers_of(parts, "weight", ("I8",), (None, None))
    outputs, inputs = numbers.shape
    scale = numbers_of(parts, "weight_scale", FLOATS)
    if scale.numel() not in (1, outputs):
        raise ModelError(
            f"weight_scale has shape {list(scale.shape)}; {outputs} outputs need {[outputs, 1]}"
        )
    for last in _ZEROS:
        if last in parts and numbers_of(parts, last, (*FLOATS, *INTEGERS)).any():
            raise ModelError(f"its {last} is not zero; only symmetric 8-bit weights are read")
    return from_groups(numbers, 0, scale.reshape(-1, 1).expand(outputs, 1), inputs)


def open_rounding(facts: CheckpointFields) -> Int8:
    """Where activations are rounded as the checkpoint asks."""
    return Int8("", True)


def open_int8(facts: CheckpointFields) -> Int8:
    return Int8()
