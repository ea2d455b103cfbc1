"""What the NPU's operators of 8-bit products compute, and what they refuse.

The fractal form is a permutation inside of the device that no other operator shows: here it is a
plain copy.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from banyan.ascend.ops import product_contracts
from banyan.ascend.ops.contracts import require

SCHEMAS = {
    "npu_dynamic_quant": "(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    "int? dst_type=None, str quant_mode='pertoken', float dst_type_max=0.0) -> (Tensor, Tensor)",
    "npu_quantize": "(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
    "bool div_mode=True) -> Tensor",
    "npu_format_cast": "(Tensor input, int acl_format, *, int? customize_dtype=None, "
    "int? input_dtype=None) -> Tensor",
    "npu_quant_matmul": "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, "
    "int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
}
_FRACTAL, _QINT8 = 29, 12
_DTYPES = {5: torch.float16, 15: torch.bfloat16}


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """A product of int8 numbers, [rows, in] by [in, out]; exact, because doubles hold all sums."""
    return rows.double() @ columns.double()


class Products:
    """The operators by their names."""

    def __init__(self, core: ModuleType) -> None:
        self._host: Callable[[Tensor], Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias
        self.fractal: set[int] = set()
        """Addresses of what was brought to the fractal form."""

    def npu_dynamic_quant(self, x: Tensor, **given: object) -> tuple[Tensor, Tensor]:
        name = "npu_dynamic_quant"
        product_contracts.dynamic_quant(x)
        require(not given, name, f"{', '.join(given)} are not served here")
        wide = self._host(x).float()
        units = wide.abs().amax(-1).clamp(min=1e-12) / 127
        numbers = (wide / units.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
        return self._device(numbers, x.device.index), self._device(units, x.device.index)

    def npu_quantize(
        self,
        x: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        dtype: int,
        axis: int = 1,
        div_mode: bool = True,
    ) -> Tensor:
        name = "npu_quantize"
        require(zero_points is not None, name, "zero_points must be given")
        assert zero_points is not None
        require(
            (dtype, axis, div_mode) == (_QINT8, -1, False),
            name,
            f"dtype qint8, axis -1 and div_mode False are served here, not {dtype}, {axis} and "
            f"{div_mode}",
        )
        product_contracts.quantize(x, scales, zero_points)
        wide = self._host(x).float() * self._host(scales).float() + self._host(zero_points).float()
        return self._device(wide.round().clamp(-128, 127).to(torch.int8), x.device.index)

    def npu_format_cast(self, x: Tensor, acl_format: int, **given: object) -> Tensor:
        name = "npu_format_cast"
        require(acl_format == _FRACTAL, name, f"form {acl_format} is not served here")
        product_contracts.format_cast(x)
        allowed = torch.get_device_module("npu").config.allow_internal_format
        require(allowed, name, "torch.npu.config.allow_internal_format must be set")
        found = self._device(self._host(x).clone(), x.device.index)
        self.fractal.add(found.data_ptr())
        return found

    def npu_quant_matmul(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        *,
        pertoken_scale: Tensor | None = None,
        bias: Tensor | None = None,
        output_dtype: int | None = None,
        **given: object,
    ) -> Tensor:
        name = "npu_quant_matmul"
        if x2.dtype == torch.int32:
            return self._by_four_bits(x1, x2, scale, pertoken_scale, output_dtype, bias, given)
        unused = [key for key, value in given.items() if value is not None]
        require(not unused, name, f"{', '.join(unused)} are not served here")
        dtype = _DTYPES.get(output_dtype or 0, torch.int8)
        product_contracts.quant_matmul(x1, x2, scale, dtype, pertoken_scale, bias)
        total = multiply(self._host(x1), self._host(x2))
        if bias is not None:
            total = total + self._host(bias)
        out = total.float() * self._host(scale)
        if pertoken_scale is not None:
            out = out * self._host(pertoken_scale).unsqueeze(1)
        return self._device(out.to(dtype), x1.device.index)

    def _by_four_bits(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        pertoken_scale: Tensor | None,
        output_dtype: int | None,
        bias: Tensor | None,
        given: dict[str, object],
    ) -> Tensor:
        name, offset = "npu_quant_matmul", given.pop("offset", None)
        unused = [key for key, value in {**given, "bias": bias}.items() if value is not None]
        require(not unused, name, f"{', '.join(unused)} are not served here")
        is_whole = offset is not None and pertoken_scale is not None
        require(is_whole, name, "offset and pertoken_scale must be given")
        assert isinstance(offset, Tensor) and pertoken_scale is not None
        dtype = _DTYPES.get(output_dtype or 0, torch.int8)
        product_contracts.four_bit_matmul(x1, x2, scale, pertoken_scale, offset, dtype)
        rows, columns, factors, lift = map(self._host, (x1, x2, scale, offset))
        out = lowered_product(rows, columns, factors) + lift
        out = out * self._host(pertoken_scale)
        return self._device(out.to(dtype), x1.device.index)


def lowered_product(rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    """(rows - 8) times 4-bit columns, of which eight lie in an int32, times what each 256 of them
    and an output are counted in. [rows, out] fp32"""
    words = columns.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = ((words & 15) ^ 8) - 8  # [in, out / 8, 8]
    units = scale.int().view(torch.float32).repeat_interleave(product_contracts.FOUR_BIT_GROUP, 0)
    weights = numbers.flatten(1).double() * units.double()
    return ((rows.double() - product_contracts.FOUR_BIT_OFFSET) @ weights).float()
