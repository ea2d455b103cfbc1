"""4-bit weights in the form that the NPU's products by 8-bit rows take: eight in an int32."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ascend.ops.expert_products import GroupedProduct, RoundedProduct
from banyan.ascend.ops.four_bit_contracts import GROUP, IN_WORD, LOWERED, MOST_INPUTS
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.quant_contracts import MOST
from banyan.ops.four_bits import BLOCK, FOUR_BITS, FourBits, pack
from banyan.ops.rounded_inputs import DYNAMIC
from banyan.ops.stored import StoredWeight


@dataclass(frozen=True)
class Packed:
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
    def of(weight: StoredWeight) -> "Packed":
        """On the host; `misfit` has nothing against the weight."""
        found = FourBits.of(weight.raw)
        scale = found.scale[:, :: GROUP // BLOCK]  # [out, in / 256]
        columns = pack(found.numbers.t().contiguous()).view(torch.int32)
        sums = found.numbers.unflatten(1, (-1, GROUP)).sum(-1, dtype=torch.int32)
        lift = LOWERED * (sums.double() * scale.double()).sum(1)
        bits = scale.t().contiguous().view(torch.int32).long() & 0xFFFFFFFF
        return Packed(columns, bits, lift.float())


def misfit(weight: StoredWeight) -> str:
    """Why the operators do not take it, "" when they do."""
    outputs, inputs = weight.shape
    if weight.type != FOUR_BITS:
        return f"it is {weight.type}"
    if inputs % GROUP or inputs > MOST_INPUTS or outputs % IN_WORD:
        return (
            f"{inputs} inputs are no multiple of {GROUP} up to {MOST_INPUTS}, or {outputs} outputs "
            f"none of {IN_WORD}"
        )
    scale = FourBits.of(weight.raw).scale.unflatten(1, (-1, GROUP // BLOCK))
    if (scale != scale[..., :1]).any():
        return f"fewer than {GROUP} inputs share a scale"
    return ""


def tell_unpacked(operators: Operators, why: str) -> None:
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
        found = Packed.of(weight)
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
        found = [Packed.of(weight) for weight in weights]
        self._columns = torch.stack([each.columns for each in found]).to(device)
        self._scale = torch.stack([each.scale for each in found]).to(device)
        self._lift = torch.stack([each.lift for each in found]).to(device)

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
    if kinds == {DYNAMIC} and all(max(each.shape) <= MOST for each in weights):
        found = RoundedProduct
    if kinds == {FOUR_BITS}:
        if why := next(filter(None, map(misfit, weights)), ""):
            tell_unpacked(operators, why)
        else:
            found = FourBitProduct
    return found(operators, weights, dtype, device)
