"""Products by group of experts: each of its rows with its own weights, as floats, or in 8 bits
where a checkpoint asks for that: weights as they are stored, and rows with a unit of each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from banyan.ascend.ops.operators import Operators
from banyan.ops.rounded_inputs import Rounding
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

    def __call__(self, rows: Tensor, counts: Tensor, units: Tensor | None = None) -> Tensor:
        """rows: [rows, in], by expert; counts: [experts], rows of each; returns [rows, out]."""
        assert units is None
        return self._operators.grouped_matmul(rows, self._columns, counts)


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

    def __call__(self, rows: Tensor, counts: Tensor, units: Tensor | None = None) -> Tensor:
        """units: [rows] of rows that are int8 already; others are rounded here."""
        if units is None:
            rows, units = self._operators.dynamic_quant(rows)
        given = (self._scale, units, self._dtype)
        return self._operators.grouped_quant_matmul(rows, self._columns, counts, *given)
