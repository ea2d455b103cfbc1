"""Linear layers and grouped products of experts by the NPU's operators: floats, int8 and int4
weights.

Activations of int8 and int4 weights are rounded to int8, with a scale per token or the static
one of the checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import (
    FOUR_BIT_GROUP,
    FOUR_BIT_OFFSET,
    FOUR_BITS_IN_WORD,
    LARGEST_WEIGHT,
    MOST_FOUR_BIT_INPUTS,
)
from banyan.ascend.ops.toolkit import NpuToolkit, declines
from banyan.ops.activation_quant import (
    BLOCK,
    DYNAMIC,
    FOUR_BITS,
    SIZES,
    FourBits,
    Rounding,
    pack_four_bits,
)
from banyan.ops.api import PackedLinear
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.stored import StoredWeight


class GroupedProduct:
    """
    Args:
        weights: of each expert, [out, in].
    """

    rounds = False

    def __init__(
        self,
        operators: Operators,
        weights: Sequence[StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._operators = operators
        dense = [weight.dense.to(device, dtype).t() for weight in weights]
        self._columns = torch.stack(dense)  # [experts, in, out]

    def parts(self, at: int) -> list[Tensor]:
        """The contiguous tensors of an expert."""
        return [self._columns[at]]

    def __call__(self, rows: Tensor, counts: Tensor, units: Tensor | None = None) -> Tensor:
        """rows: [rows, in], by expert; counts: [experts], rows of each; returns [rows, out]."""
        assert units is None
        return self._operators.experts.grouped_matmul(rows, self._columns, counts)


class RoundedProduct(GroupedProduct):
    """Of weights that all are W8A8_DYNAMIC."""

    rounds = True

    def __init__(
        self,
        operators: Operators,
        weights: Sequence[StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._operators, self._dtype = operators, dtype
        found = [Rounding.of(weight.raw, weight.type) for weight in weights]
        columns = torch.stack([each.numbers.t() for each in found])
        self._columns = operators.cast_fractal(columns.contiguous().to(device))
        # The operator wants factors of bfloat16 where it makes such numbers.
        kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self._scale = torch.stack([each.scale for each in found]).to(device, kind)

    def parts(self, at: int) -> list[Tensor]:
        return [self._columns[at], self._scale[at]]

    def __call__(self, rows: Tensor, counts: Tensor, units: Tensor | None = None) -> Tensor:
        """units: [rows] of rows that are int8 already; others are rounded here."""
        if units is None:
            rows, units = self._operators.dynamic_quant(rows)
        given = (self._scale, units, self._dtype)
        return self._operators.experts.grouped_quant_matmul(rows, self._columns, counts, *given)


@dataclass(frozen=True)
class PackedFourBits:
    """
    Attributes:
        columns: [in, out / 8] int32.
        scale: [in / 256, out] int64, the bits of fp32.
        lift: [out] fp32, what the operators take away.
    """

    columns: Tensor
    scale: Tensor
    lift: Tensor

    @staticmethod
    def of(weight: StoredWeight) -> "PackedFourBits":
        """On the host; `four_bit_obstacle` has nothing against the weight."""
        found = FourBits.of(weight.raw)
        scale = found.scale[:, :: FOUR_BIT_GROUP // BLOCK]  # [out, in / 256]
        columns = pack_four_bits(found.numbers.t().contiguous()).view(torch.int32)
        sums = found.numbers.unflatten(1, (-1, FOUR_BIT_GROUP)).sum(-1, dtype=torch.int32)
        lift = FOUR_BIT_OFFSET * (sums.double() * scale.double()).sum(1)
        bits = scale.t().contiguous().view(torch.int32).long() & 0xFFFFFFFF
        return PackedFourBits(columns, bits, lift.float())


def four_bit_obstacle(weight: StoredWeight) -> str:
    """Why the operators do not take it, "" when they do."""
    outputs, inputs = weight.shape
    if weight.type != FOUR_BITS:
        return f"it is {weight.type}"
    if inputs % FOUR_BIT_GROUP or inputs > MOST_FOUR_BIT_INPUTS or outputs % FOUR_BITS_IN_WORD:
        return (
            f"{inputs} inputs are no multiple of {FOUR_BIT_GROUP} up to {MOST_FOUR_BIT_INPUTS}, "
            f"or {outputs} outputs none of {FOUR_BITS_IN_WORD}"
        )
    scale = FourBits.of(weight.raw).scale.unflatten(1, (-1, FOUR_BIT_GROUP // BLOCK))
    if (scale != scale[..., :1]).any():
        return f"fewer than {FOUR_BIT_GROUP} inputs share a scale"
    return ""


def warn_unpacked(operators: Operators, why: str) -> None:
    operators.warn(f"weights of {FOUR_BITS} are unpacked, and activations not rounded: {why}")


class FourBitLinear:
    def __init__(
        self,
        operators: Operators,
        weight: StoredWeight,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._operators, self._dtype = operators, dtype
        found = PackedFourBits.of(weight)
        self._columns, self._scale = found.columns.to(device), found.scale.to(device)
        self._lift = found.lift.to(device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        numbers, units = self._operators.dynamic_quant(x.contiguous())
        given = (self._scale, units.unsqueeze(1), self._lift, self._dtype)
        out = self._operators.four_bits.matmul(numbers, self._columns, *given)
        return out if bias is None else out + bias


class FourBitProduct(GroupedProduct):
    """By group of experts whose weights all are of 4 bits."""

    rounds = True

    def __init__(
        self,
        operators: Operators,
        weights: Sequence[StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._operators, self._dtype = operators, dtype
        found = [PackedFourBits.of(weight) for weight in weights]
        self._columns = torch.stack([each.columns for each in found]).to(device)
        self._scale = torch.stack([each.scale for each in found]).to(device)
        self._lift = torch.stack([each.lift for each in found]).to(device)

    def parts(self, at: int) -> list[Tensor]:
        return [self._columns[at], self._scale[at], self._lift[at]]

    def __call__(self, rows: Tensor, counts: Tensor, units: Tensor | None = None) -> Tensor:
        """units: [rows] of rows that are int8 already; others are rounded here."""
        if units is None:
            rows, units = self._operators.dynamic_quant(rows)
        given = (self._scale, units, self._lift, self._dtype)
        return self._operators.four_bits.grouped_matmul(rows, self._columns, counts, *given)


def product_of(
    operators: Operators,
    weights: Sequence[StoredWeight],
    dtype: torch.dtype,
    device: torch.device,
) -> GroupedProduct:
    """The product by group that all these weights allow."""
    kinds = {each.type for each in weights}
    found = GroupedProduct
    if kinds == {DYNAMIC} and all(max(each.shape) <= LARGEST_WEIGHT for each in weights):
        found = RoundedProduct
    if kinds == {FOUR_BITS}:
        if why := next(filter(None, map(four_bit_obstacle, weights)), ""):
            warn_unpacked(operators, why)
        else:
            found = FourBitProduct
    return found(operators, weights, dtype, device)


class RoundedLinear:
    """Weights as columns in the device's fractal form, where their sizes allow it.

    Inputs are rounded by unit and offset of the checkpoint, else by a unit of each token.
    """

    def __init__(
        self, operators: Operators, found: Rounding, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._operators = operators
        self._dtype = dtype
        columns = found.numbers.t().contiguous().to(device)  # [in, out]
        self._columns = operators.cast_fractal(columns)
        self._inverse: Tensor | None = None
        scale = found.scale
        if found.unit is not None and found.offset is not None:
            unit, offset = found.unit[:1], found.offset[:1]
            scale = scale * unit
            taken = -offset.double() * found.numbers.sum(1, dtype=torch.int64)
            self._inverse = unit.reciprocal().to(device, dtype)
            self._offset = offset.to(device, dtype)
            self._taken = taken.round().to(torch.int32).to(device)
        self._scale = scale.to(device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        operators, x = self._operators, x.contiguous()
        if self._inverse is None:
            numbers, units = operators.dynamic_quant(x)
            given = {"pertoken_scale": units}
        else:
            numbers = operators.quantize(x, self._inverse, self._offset)
            given = {"bias": self._taken}
        out = operators.quant_matmul(numbers, self._columns, self._scale, self._dtype, **given)
        return out if bias is None else out + bias


class PlainLinear:
    """What the operators do not take. [out, in]"""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self._weight, bias)


def _declines(spec: OpSpec) -> str | None:
    reason = declines(spec)
    if reason is None and spec.weight_type not in (*SIZES, FOUR_BITS):
        reason = f"rounds no inputs of {spec.weight_type}"
    return reason


def _linear(toolkit: NpuToolkit) -> Callable[..., PackedLinear]:
    def pack(
        weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
    ) -> PackedLinear:
        if weight.type == FOUR_BITS:
            if why := four_bit_obstacle(weight):
                warn_unpacked(toolkit.operators, why)
                return PlainLinear(weight.dense.to(device, dtype))
            return FourBitLinear(toolkit.operators, weight, dtype, device)
        found = Rounding.of(weight.raw, weight.type)
        units = {tuple(part.tolist()) for part in (found.unit, found.offset) if part is not None}
        is_shared = all(len(set(unit)) == 1 for unit in units)
        if not is_shared or max(weight.shape) > LARGEST_WEIGHT:
            return PlainLinear(weight.dense.to(device, dtype))
        return RoundedLinear(toolkit.operators, found, dtype, device)

    return pack


linear_kernel = Kernel(supports=_declines, make=_linear, rounds_activations=True)
