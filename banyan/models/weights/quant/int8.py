"""8-bit integers with one scale per output, the form that w8a8_int8 names.

    weight int8 [out, in], weight_scale [out, 1]

The numbers become Q8_0, the scale repeated in every block.
"""

from dataclasses import dataclass

from banyan.base.errors import ModelError
from banyan.config.facts import Facts
from banyan.models.weights.quant.base import (
    FLOATS,
    INTEGERS,
    Parts,
    Restored,
    numbers_of,
    part_among,
)
from banyan.models.weights.quant.groups import from_groups

_PARTS = ("weight_scale", "weight_offset", "weight_zero_point", "input_scale", "input_zero_point")
_ZEROS = ("weight_offset", "weight_zero_point")


@dataclass(frozen=True)
class Int8:
    remark: str = "activations are not rounded to 8 bits as the checkpoint asks"

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among((*_PARTS, "weight") if type == "I8" else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        return by_output(parts)


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


def open_int8(facts: Facts) -> Int8:
    return Int8()
