"""Products of weights of 8 and of 4 bits by activations that are rounded to 8 bits, by the NPU's
operators."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from banyan.ascend.ops.four_bits import FourBitLinear, misfit, tell_unpacked
from banyan.ascend.ops.needs import NpuToolkit, declines
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.quant_contracts import MOST
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.four_bits import FOUR_BITS
from banyan.ops.packed import PackedLinear
from banyan.ops.rounded_inputs import SIZES, Rounding
from banyan.ops.stored import StoredWeight


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
            if why := misfit(weight):
                tell_unpacked(toolkit.operators, why)
                return PlainLinear(weight.dense.to(device, dtype))
            return FourBitLinear(toolkit.operators, weight, dtype, device)
        found = Rounding.of(weight.raw, weight.type)
        units = {tuple(part.tolist()) for part in (found.unit, found.offset) if part is not None}
        is_shared = all(len(set(unit)) == 1 for unit in units)
        if not is_shared or max(weight.shape) > MOST:
            return PlainLinear(weight.dense.to(device, dtype))
        return RoundedLinear(toolkit.operators, found, dtype, device)

    return pack


linear_kernel = Kernel(supports=_declines, make=_linear, rounds_activations=True)
