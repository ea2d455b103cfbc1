"""Projections whose weights stay 8-bit floats (e4m3) on the CUDA device.

A weight has a scale per output, or per group of inputs and one or 128 outputs; a scale per tensor
is kept per output, since outputs of several tensors may be stacked. If the checkpoint asks for it,
or `--quantization fp8`, activations are rounded to e4m3 as well:

    rows to FEW_ROWS    while the product reads them, with a scale per row and 128 inputs
    more                by a kernel before the product, with a scale per row; per row and 128 inputs
                        if the weight has groups
    product             `torch._scaled_mm` for many rows, where it has the product; else Triton

Otherwise, and on devices without such products (before Ada), the numbers become the activations'
type in registers; above `products.UNPACK_ABOVE` rows the weight is unpacked for a product of the
vendor's library.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from banyan.base.log import logger
from banyan.ops.api import PackedLinear
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.blocks import BLOCK
from banyan.ops.cuda import products
from banyan.ops.cuda.needs import FP8, TRITON, VENDOR, CudaToolkit, declines, power_of_two
from banyan.ops.cuda.products import OUTPUTS_STEP, Shape, fitted
from banyan.ops.reference import DenseLinear
from banyan.ops.rounding import FP8_MOST
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, STORAGE_TYPES, StoredWeight

_log = logger(__name__)

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability that multiplies 8-bit floats."""
SIDE = 128
"""Inputs, and outputs, that share a scale in blocks."""
_GROUPS = (SIDE, 64, BLOCK)
_VENDOR_STEP = 16
"""Outputs and inputs of the vendor's product are a multiple of this."""
_LEAST_SCALE = 1e-30
_MOST_BYTES = 1 << 28
"""Bytes of a weight's floats that are rounded at once."""
_MOST_ROW = 8192
FEW_ROWS = 16
"""Up to so many rows the product rounds activations itself."""
VENDOR_ABOVE = 64
"""With more rows than this, the vendor's products with a scale per output are the faster ones."""
_WIDE = 12800
"""Outputs whose blocks fill the multiprocessors of an H100."""
_PADDED_ROWS = 16
"""The vendor's products have a multiple of this of rows."""


@dataclass(frozen=True)
class PackedFloats:
    """A weight [outputs, inputs] on the device.

    Attributes:
        group: inputs that share a scale.
        shared: outputs that share it, 1 or SIDE.
        numbers: [padded outputs, inputs] e4m3.
        scales: [inputs / group, padded outputs / shared] fp32.
    """

    outputs: int
    inputs: int
    group: int
    shared: int
    numbers: Tensor
    scales: Tensor

    @property
    def is_grouped(self) -> bool:
        return len(self.scales) > 1

    @property
    def size_bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


def pack(weight: StoredWeight, device: torch.device) -> PackedFloats:
    """Pack a weight [outputs, inputs] of E4M3 or E4M3_DYNAMIC. Scales that neighbours share are
    kept once."""
    outputs, inputs = weight.shape
    size = STORAGE_TYPES[weight.type].size_bytes
    padded = -(-outputs // OUTPUTS_STEP) * OUTPUTS_STEP
    numbers = torch.zeros(padded, inputs, dtype=torch.uint8, device=device)
    scale = torch.zeros(padded, inputs // BLOCK, device=device)
    step = max(1, _MOST_BYTES // (inputs // BLOCK * size))
    for first in range(0, outputs, step):
        raw = weight.raw[first : first + step].to(device).view(-1, inputs // BLOCK, size)
        numbers[first : first + len(raw)] = raw[..., :BLOCK].flatten(1)
        scale[first : first + len(raw)] = (
            raw[..., BLOCK:].contiguous().view(torch.float32).squeeze(-1)
        )
    return _packed(numbers.view(torch.float8_e4m3fn), scale, outputs)


def _packed(numbers: Tensor, scale: Tensor, outputs: int) -> PackedFloats:
    """numbers: [padded outputs, inputs]; scale: [padded outputs, inputs / BLOCK]."""
    inputs = numbers.shape[1]
    group = next(
        size
        for size in (inputs, *_GROUPS)
        if inputs % size == 0 and _is_shared(scale[:outputs], size // BLOCK)
    )
    scales = scale[:, :: group // BLOCK].t().contiguous()
    shared = 1
    if group == SIDE and outputs % SIDE == 0 and _is_shared(scales, SIDE):
        scales, shared = scales[:, ::SIDE].contiguous(), SIDE
    return PackedFloats(outputs, inputs, group, shared, numbers, scales)


def _is_shared(scale: Tensor, count: int) -> bool:
    """Whether `count` neighbours have the same bits. scale: [n, a multiple of count]"""
    pieces = scale.contiguous().view(torch.int32).view(len(scale), -1, count)
    return bool((pieces == pieces[..., :1]).all())


def rounded_weight(values: Tensor) -> PackedFloats:
    """Floats [outputs, inputs] on the device, rounded with a scale per output; inputs are a
    multiple of BLOCK."""
    outputs, inputs = values.shape
    padded = -(-outputs // OUTPUTS_STEP) * OUTPUTS_STEP
    numbers = torch.zeros(padded, inputs, dtype=torch.uint8, device=values.device)
    scales = torch.zeros(1, padded, device=values.device)
    step = max(1, _MOST_BYTES // (inputs * 4))
    for first in range(0, outputs, step):
        wide = values[first : first + step].float()
        scale = wide.abs().amax(1).clamp(min=_LEAST_SCALE) / FP8_MOST
        made = (wide / scale[:, None]).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
        numbers[first : first + len(wide)] = made.view(torch.uint8)
        scales[0, first : first + len(wide)] = scale
    return PackedFloats(outputs, inputs, inputs, 1, numbers.view(torch.float8_e4m3fn), scales)


def round_rows(x: Tensor, group: int = 0, padding: int = 1) -> tuple[Tensor, Tensor]:
    """Round activations.

    Args:
        x: [rows, inputs], rows may lie apart.
        group: inputs that share a scale, a power of two that divides the inputs; 0 = all of them.
        padding: rows are added up to a multiple of this, with anything in them.

    Returns:
        [rows, inputs] e4m3; scales fp32, [rows], or [inputs / group, rows].
    """
    from banyan.ops.cuda import product_kernels

    assert x.stride(1) == 1
    rows, inputs = x.shape
    padded = -(-rows // padding) * padding
    numbers = torch.empty(padded, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (inputs // group, padded) if group else (padded,)
    scales = torch.empty(shape, device=x.device)
    block = min(power_of_two(inputs), max(group, 2048 if group else _MOST_ROW))
    if rows:
        product_kernels.round_rows[(rows, -(-inputs // block) if group else 1)](
            x, numbers, scales, padded, inputs, x.stride(0),
            GROUP=group, BLOCK=block, MOST=FP8_MOST, num_warps=4 if group else 8,
        )  # fmt: skip
    return numbers, scales


def shape_of(rows: int, weight: PackedFloats, exact: torch.dtype | None = None) -> Shape:
    """The block sizes for some rows: the fastest ones in `benchmarks/cuda_products.py`.

    Args:
        exact: type of activations that are not rounded.
    """
    if exact == torch.float32:  # multiplied without tensor cores
        shape, blocks = Shape(16 if rows <= 16 else 32, 64, 1, is_turned=True, stages=2), 528
    elif rows <= 16:
        shape = Shape(16, 128, 1, is_turned=True, stages=4)
        is_wide = weight.outputs >= _WIDE
        blocks = 132 if is_wide and (exact is not None or not weight.is_grouped) else 264
    elif exact is not None:
        size = 64 if rows <= 64 else 128
        shape, blocks = Shape(size, 128, 1, is_turned=True, warps=8, stages=3), 132
    elif rows <= 64:
        shape, blocks = Shape(32 if rows <= 32 else 64, 64, 1, is_turned=True, stages=5), 264
    else:
        shape, blocks = Shape(128, 128, 1, is_turned=True, warps=8, stages=3), 132
    return products.with_parts(shape, blocks, rows, weight.outputs, weight.inputs)


def product(
    x: Tensor,
    weight: PackedFloats,
    bias: Tensor | None,
    shape: Shape,
    dtype: torch.dtype,
    rounds: bool,
    x_scales: Tensor | None = None,
    assembly: str = "",
    counters: Tensor | None = None,
) -> Tensor:
    """x·Wᵀ + bias in Triton.

    Args:
        x: [tokens, in], tokens may lie apart; 8-bit floats with `x_scales` of `round_rows`.
        bias: [out] or None.
        dtype: of the result.
        rounds: x is rounded to 8-bit floats by this product.
        assembly: PTX that converts the weights to x's type (`conversion`); "" = the compiler's.
        counters: from `products.counters_for`, to add the parts in the same kernel; None = in
            another one.
    """
    from banyan.ops.cuda import product_kernels

    assert x.shape[1] == weight.inputs and x.stride(1) == 1
    rows, outputs = len(x), weight.outputs
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if not rows:
        return out
    how = "rounded" if x_scales is not None else "rounding" if rounds else "exact"
    numbers = weight.numbers.view(torch.uint8) if how == "exact" else weight.numbers
    step = min(weight.group, SIDE) if weight.is_grouped else SIDE
    steps = -(-weight.inputs // step)
    per_part = -(-steps // shape.parts)
    parts = -(-steps // per_part)
    made = out
    if parts > 1:
        made = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (-(-rows // shape.rows), -(-outputs // shape.outputs), parts)
    adds = parts > 1 and counters is not None and grid[0] * grid[1] <= len(counters)
    product_kernels.multiply_floats[grid](
        x,
        weight.scales if x_scales is None else x_scales,
        numbers,
        weight.scales,
        x if bias is None else bias,
        made,
        out,
        counters if adds else out,
        rows,
        weight.inputs,
        outputs,
        len(numbers),
        x.stride(0),
        steps,
        per_part,
        weight.group // step,
        HOW=how,
        IS_GROUPED=weight.is_grouped,
        X_IS_GROUPED=x_scales is not None and x_scales.dim() > 1,
        SHARED=weight.shared,
        HAS_BIAS=bias is not None and (parts == 1 or adds),
        IS_EVEN=weight.inputs % step == 0,
        STEP=step,
        ROWS=shape.rows,
        OUTPUTS=shape.outputs,
        ASSEMBLY=assembly,
        MOST=FP8_MOST,
        ADDS=adds,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if parts > 1 and not adds:
        products.add_up(made, bias, out)
    return out


def unpacked(weight: PackedFloats, dtype: torch.dtype) -> Tensor:
    """The unpacked weight [out, in]."""
    from banyan.ops.cuda import product_kernels

    size = (weight.outputs, weight.inputs)
    out = torch.empty(size, dtype=dtype, device=weight.numbers.device)
    step, block = 128, 32
    product_kernels.unpack_floats[(-(-weight.inputs // step), -(-weight.outputs // block))](
        weight.numbers.view(torch.uint8), weight.scales, out, weight.inputs, weight.outputs,
        len(weight.numbers), weight.group, SHARED=weight.shared, STEP=step, OUTPUTS=block,
    )  # fmt: skip
    return out


class FloatLinear:
    """A packed weight (`PackedFloats`) and its kernels.

    Args:
        dtype: of activations.
        rounds: activations are rounded to 8-bit floats.
        backend: TRITON, VENDOR, or "" for the faster one.
    """

    def __init__(
        self, weight: PackedFloats, dtype: torch.dtype, rounds: bool, backend: str = ""
    ) -> None:
        self.weight = weight
        self._rounds = rounds
        self._counters = products.counters_for(weight.outputs, weight.numbers.device)
        self._assembly = "" if rounds else assembly_for(weight, dtype)
        can = rounds and backend != TRITON and has_vendor_product(weight, dtype)
        first = FEW_ROWS if weight.is_grouped else VENDOR_ABOVE
        self._vendor_above = math.inf if not can else 0 if backend == VENDOR else first
        self._vendor_scales = vendor_scales(weight) if can else weight.scales

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, rows = self.weight, len(x)
        if not self._rounds:
            if rows > products.UNPACK_ABOVE:
                return functional.linear(x, unpacked(weight, x.dtype), bias)
            shape = fitted(shape_of(rows, weight, x.dtype), x.device)
            more = (None, self._assembly, self._counters)
            return product(x, weight, bias, shape, x.dtype, False, *more)
        group = min(weight.group, SIDE) if weight.is_grouped else 0
        if rows > self._vendor_above:
            numbers, scales = round_rows(x, group, _PADDED_ROWS)
            return vendor_product(numbers, scales, weight, self._vendor_scales, bias)[:rows]
        shape = fitted(shape_of(rows, weight), x.device)
        if rows <= FEW_ROWS:
            return product(x, weight, bias, shape, x.dtype, True, None, "", self._counters)
        numbers, scales = round_rows(x, group)
        return product(numbers, weight, bias, shape, x.dtype, True, scales, "", self._counters)


def vendor_scales(weight: PackedFloats) -> Tensor:
    """A weight's scales as the vendor's product takes them: [1, outputs], or [groups, outputs /
    SIDE] with adjacent groups."""
    if weight.is_grouped:
        return weight.scales.t().contiguous().t()
    return weight.scales[:, : weight.outputs]


def has_vendor_product(weight: PackedFloats, dtype: torch.dtype) -> bool:
    """Whether the vendor's library multiplies this weight with rounded activations."""
    is_even = not (weight.outputs % _VENDOR_STEP or weight.inputs % _VENDOR_STEP)
    if not _is_on_cuda(weight) or dtype != torch.bfloat16 or not is_even:
        return False
    if not weight.is_grouped:
        return True
    # The library reads four scales of adjacent groups at once.
    is_block = weight.shared == SIDE and len(weight.scales) % 4 == 0
    return is_block and _multiplies_blocks(weight.numbers.device)


@cache
def _multiplies_blocks(device: torch.device) -> bool:
    """Whether this device and version of the library multiply blocks: a trial shows it."""
    numbers = torch.zeros(512, 512, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = PackedFloats(512, 512, SIDE, SIDE, numbers, torch.ones(4, 4, device=device))
    x, x_scales = numbers[:_PADDED_ROWS], torch.ones(4, _PADDED_ROWS, device=device)
    try:
        out = vendor_product(x, x_scales, weight, vendor_scales(weight), None)
        return not bool(out.any())
    except (RuntimeError, ValueError) as error:
        _log.info("blocks of 8-bit floats are multiplied by Triton: %s", str(error).split("\n")[0])
        return False


def vendor_product(
    numbers: Tensor,
    x_scales: Tensor,
    weight: PackedFloats,
    scales: Tensor,
    bias: Tensor | None,
    fast: bool = False,
) -> Tensor:
    """x·Wᵀ + bias in bf16, by the vendor's library.

    Args:
        numbers, x_scales: of `round_rows`, in groups as the weight's; a multiple of 16 rows.
        scales: of `vendor_scales`.
        fast: sums of fewer bits within the product.
    """
    out = torch.ops.aten._scaled_mm(
        numbers,
        weight.numbers[: weight.outputs].t(),
        x_scales.t() if weight.is_grouped else x_scales[:, None],
        scales,
        bias=None if weight.is_grouped else bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return out.add_(bias) if weight.is_grouped and bias is not None else out


def conversion(dtype: torch.dtype) -> str:
    """PTX: four e4m3 bytes ($2) as halves ($0, $1); "" for types that are not halves. The bits of
    sign, exponent and fraction are moved to their places; a product mends the exponent's bias."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ""
    is_wide = dtype == torch.bfloat16
    pair, shift, mask, factor = (
        ("bf16x2", 4, "0x07f007f0", "0x7b807b80") if is_wide else
        ("f16x2", 1, "0x3f803f80", "0x5c005c00")
    )  # fmt: skip
    lines = [
        "prmt.b32 p, $2, 0, 0x1404; prmt.b32 q, $2, 0, 0x3424;",
        f"mov.b32 z, {factor}; mov.b32 y, 0x80008000;",
        *(
            f"shr.u32 {to}, {by}, {shift}; and.b32 {to}, {to}, {mask}; "
            f"lop3.b32 {to}, {to}, {by}, 0x80008000, 0xf8; fma.rn.{pair} {to}, {to}, z, y;"
            for to, by in (("$0", "p"), ("$1", "q"))
        ),
    ]
    return "{ .reg .b32 p, q, y, z; " + " ".join(lines) + " }"


def assembly_for(weight: PackedFloats, dtype: torch.dtype) -> str:
    """PTX that converts a weight's numbers on its device; "" = the compiler generates it."""
    return conversion(dtype) if _is_on_cuda(weight) else ""


def _is_on_cuda(weight: PackedFloats) -> bool:
    return weight.numbers.device.type == "cuda"


def _is_too_old(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) < LEAST_CAPABILITY


def _wants_fp8(spec: OpSpec) -> bool:
    is_float = STORAGE_TYPES[spec.weight_type].is_float
    toolkit = spec.toolkit
    return is_float and isinstance(toolkit, CudaToolkit) and toolkit.quantization == FP8


def _declines_rounding(spec: OpSpec) -> str | None:
    if spec.weight_type != E4M3_DYNAMIC and not _wants_fp8(spec):
        return "for 8-bit floats whose activations are rounded"
    if _is_too_old(spec.device):
        return "this device does not multiply 8-bit floats"
    return declines(spec)


def _declines_exact(spec: OpSpec) -> str | None:
    if spec.weight_type not in (E4M3, E4M3_DYNAMIC) and not _wants_fp8(spec):
        return "for 8-bit floats"
    return declines(spec)


def _packer(toolkit: object, rounds: bool) -> Callable[..., PackedLinear]:
    backend = toolkit.fp8_backend if isinstance(toolkit, CudaToolkit) else ""

    def pack_linear(
        weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
    ) -> PackedLinear:
        if not STORAGE_TYPES[weight.type].is_float:
            return FloatLinear(pack(weight, device), dtype, rounds, backend)
        if weight.shape[1] % BLOCK:
            _log.warning(
                "a weight %s stays as it is: its inputs are no whole blocks of %d",
                list(weight.shape),
                BLOCK,
            )
            return DenseLinear(weight.dense.to(device, dtype))
        packed = rounded_weight(weight.dense.to(device))
        return FloatLinear(packed, dtype, rounds and not is_head, backend)

    return pack_linear


rounding_linear = Kernel(
    supports=_declines_rounding,
    make=lambda toolkit: _packer(toolkit, rounds=True),
    rounds_activations=True,
)
linear = Kernel(supports=_declines_exact, make=lambda toolkit: _packer(toolkit, rounds=False))
