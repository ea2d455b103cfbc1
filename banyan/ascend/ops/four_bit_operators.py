"""Products of 8-bit rows by 4-bit weights, as `operators.py` has the others. Arguments are those of
`four_bit_contracts.py`."""

from typing import Any

import torch
from torch import Tensor

from banyan.ascend.ops import four_bit_contracts


class FourBitOperators:
    """
    Args:
        is_checked, npu: as of `Operators`, and what has them.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu

    def matmul(
        self,
        x: Tensor,
        columns: Tensor,
        scale: Tensor,
        units: Tensor,
        lift: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """((x - 8) · columns · scale + lift) · units, [tokens, out]."""
        if self._is_checked:
            four_bit_contracts.quant_matmul(x, columns, scale, units, lift, dtype)
        given = {"offset": lift, "pertoken_scale": units, "output_dtype": dtype}
        return self._npu.npu_quant_matmul(x, columns, scale, **given)

    def grouped_matmul(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        scale: Tensor,
        units: Tensor,
        lift: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The same, each row with the weights of its group, [rows, out]."""
        if self._is_checked:
            four_bit_contracts.grouped_matmul(x, weight, counts, scale, units, lift, dtype)
        return self._npu.npu_grouped_matmul(
            [x],
            [weight],
            bias=[lift],
            scale=[scale],
            per_token_scale=[units],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=dtype,
        )[0]
