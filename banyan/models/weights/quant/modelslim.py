"""modelslim, Ascend's quantiser: `quant_model_description.json` names a scheme for every tensor.

    weight int8 [out, in], weight_scale [out, 1], weight_offset [out, 1] (zero)
    W8A8 also: input_scale, input_offset [1], quant_bias int32 [out], deq_scale [out]
    W4A8_DYNAMIC: weight int8 [out / 2, in], even outputs in the lower half of a byte, odd ones in
        the upper half; or one number in a byte [out, in]; with groups of inputs also
        weight_scale_second, weight_offset_second (zero) [out, groups]; optionally scale_bias
        [out, n], whose sums over n are 8 times the sums of an output's weights

W8A8 folds the projection's bias and the correction for the activations' offset into quant_bias; the
plain bias is restored. If activations are not rounded, the numbers become Q8_0, or Q4_0 for
W4A8_DYNAMIC. scale_bias must follow from the weights; otherwise the file is damaged, or bytes hold
numbers in another order.

Source: the documentation of msit's msmodelslim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, INTEGERS, Parts, Restored, numbers_of
from banyan.models.weights.quant.groups import from_groups
from banyan.models.weights.quant.int8 import by_output, rounded
from banyan.ops.activation_quant import BLOCK, FOUR_BITS, SIZES, STATIC, FourBits, _four_bit_numbers
from banyan.ops.stored import StoredWeight

SCHEMES = ("W8A8", "W8A8_DYNAMIC", "W8A16", FOUR_BITS)
_LIFT, _NEAR = 8, 1e-2
"""What scale_bias is of the sum of an output's weights; how far both may be apart."""
_PLAIN = "FLOAT"
_PARTS = (
    "weight",
    "bias",
    "weight_scale",
    "weight_offset",
    "input_scale",
    "input_offset",
    "quant_bias",
    "deq_scale",
    "weight_scale_second",
    "weight_offset_second",
    "scale_bias",
)


@dataclass(frozen=True)
class ModelSlim:
    """
    Attributes:
        schemes: module -> a name of SCHEMES.
        keeps_rounding: activations are rounded as it asks, so what that needs is kept.
    """

    schemes: Mapping[str, str]
    remark: str
    keeps_rounding: bool = False

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        stem, _, last = name.rpartition(".")
        return (stem, last) if stem in self.schemes and last in _PARTS else None

    def restore(self, stem: str, parts: Parts) -> Restored:
        if self.schemes[stem] == FOUR_BITS:
            found = _four_bits(parts, self.keeps_rounding)
        else:
            found = by_output(parts)
        if self.keeps_rounding:
            found = self._with_rounding(stem, parts, found)
        if "bias" in parts:
            return replace(found, bias=StoredWeight.from_tensor(numbers_of(parts, "bias", FLOATS)))
        if self.schemes[stem] != "W8A8":
            return found
        return replace(found, bias=_folded_bias(parts))

    def _with_rounding(self, stem: str, parts: Parts, found: Restored) -> Restored:
        scheme, inputs = self.schemes[stem], found.weight.shape[1]
        if scheme not in SIZES or inputs % BLOCK:
            return found
        units = list[Tensor]()
        if scheme == STATIC:
            units.append(numbers_of(parts, "input_scale", FLOATS, (1,)))
            units.append(numbers_of(parts, "input_offset", (*FLOATS, *INTEGERS), (1,)))
        return rounded(parts, scheme, units)


def _four_bits(parts: Parts, keeps_rounding: bool) -> Restored:
    numbers = numbers_of(parts, "weight", ("I8",), (None, None))
    scale = numbers_of(parts, "weight_scale", FLOATS).float().reshape(-1, 1)
    if len(scale) == 2 * len(numbers):
        numbers = _apart(numbers)
    outputs, inputs = numbers.shape
    if "weight_scale_second" in parts:
        second = numbers_of(parts, "weight_scale_second", FLOATS, (outputs, None)).float()
    else:
        second = torch.ones(outputs, 1)
    groups = second.shape[1]
    if len(scale) != outputs or not groups or inputs % groups:
        raise ModelError(
            f"weight_scale has {len(scale)} numbers and weight_scale_second the shape "
            f"{list(second.shape)}; {[outputs, inputs]} numbers need [{outputs}, 1] and "
            f"[{outputs}, groups]"
        )
    for last in ("weight_offset", "weight_offset_second"):
        if last in parts and numbers_of(parts, last, (*FLOATS, *INTEGERS)).any():
            raise ModelError(f"its {last} is not zero; only symmetric 4-bit weights are read")
    if numbers.min() < -8 or numbers.max() > 7:
        raise ModelError("weight has numbers that are not of 4 bits, from -8 to 7")
    scale, size = scale * second, inputs // groups
    if "scale_bias" in parts:
        _check_the_sums(numbers, scale, numbers_of(parts, "scale_bias", FLOATS, (outputs, None)))
    if not keeps_rounding or size % BLOCK:
        return from_groups(numbers, 0, scale, size)
    raw = FourBits(numbers, scale.repeat_interleave(size // BLOCK, 1)).raw
    return Restored(StoredWeight(FOUR_BITS, (outputs, inputs), raw))


def _apart(packed: Tensor) -> Tensor:
    """The numbers of two outputs each. [out / 2, in] int8 -> [out, in]"""
    both = _four_bit_numbers(packed.view(torch.uint8).unsqueeze(-1))  # [out / 2, in, 2]
    return both.transpose(1, 2).flatten(0, 1)


def _check_the_sums(numbers: Tensor, scale: Tensor, given: Tensor) -> None:
    groups = numbers.unflatten(1, (scale.shape[1], -1))
    sums = _LIFT * (groups.sum(-1, dtype=torch.int32) * scale).sum(1)
    sizes = _LIFT * (groups.abs().sum(-1, dtype=torch.int32) * scale.abs()).sum(1)
    off = ((given.float().sum(1) - sums).abs() - _NEAR * sizes).max()
    if not off <= 0:
        raise ModelError(
            f"scale_bias is not {_LIFT} times the sums of the weights",
            hint="the file is damaged, or its bytes hold two outputs in another order; convert it "
            "anew",
        )


def _folded_bias(parts: Parts) -> StoredWeight | None:
    """The bias in quant_bias, None when there is nothing but the rounding of the rest."""
    numbers = numbers_of(parts, "weight", ("I8",), (None, None))
    outputs = len(numbers)
    bias = numbers_of(parts, "quant_bias", ("I32",), (outputs,)).double()
    offset = float(numbers_of(parts, "input_offset", (*FLOATS, *INTEGERS), (1,)))
    unit = numbers_of(parts, "input_scale", FLOATS, (1,)).double()
    units = bias + offset * numbers.sum(1, dtype=torch.int64)
    if not math.isfinite(offset) or units.abs().max() <= 1.0:
        return None
    scale: Tensor = numbers_of(parts, "weight_scale", FLOATS).double().flatten()
    return StoredWeight.from_tensor((units * unit * scale).float())


def open_rounding(facts: CheckpointFields) -> ModelSlim:
    """Where activations are rounded as the checkpoint asks."""
    return replace(open_modelslim(facts), remark="", keeps_rounding=True)


def open_modelslim(facts: CheckpointFields) -> ModelSlim:
    described = facts.any("schemes")
    if not isinstance(described, Mapping) or not described:
        raise ModelError(
            "quant_model_description.json names no tensor ending with .weight",
            hint="the file is damaged or of another kind; download it again",
        )
    schemes = {name.removesuffix(".weight"): scheme for name, scheme in described.items()}
    for name, scheme in schemes.items():
        if scheme not in (_PLAIN, *SCHEMES):
            raise ModelError(
                f"quant_model_description.json: {printable(name)!r} is {printable(str(scheme))!r}; "
                f"read are {', '.join((_PLAIN, *SCHEMES))}",
                hint="convert the model to W8A8, or name the float weights",
            )
    mine = {name: scheme for name, scheme in schemes.items() if scheme != _PLAIN}
    rounds = any(scheme != "W8A16" for scheme in mine.values())
    remark = "activations are not rounded to 8 bits as the checkpoint asks" if rounds else ""
    return ModelSlim(mine, remark)
