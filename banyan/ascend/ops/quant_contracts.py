"""What the NPU's operators of 8-bit products accept, as `contracts.py` says it for others."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import HALVES, placed, require, shape_of, typed

MOST = 65535
"""Inputs and outputs of a weight."""
ROW_STEP, COLUMN_STEPS = 16, {torch.int8: 32, **dict.fromkeys(HALVES, 16)}
"""What rows must be multiples of for the fractal form, and columns of each type."""


def dynamic_quant(x: Tensor) -> None:
    name = "npu_dynamic_quant"
    placed(name, input=x)
    typed(name, HALVES, input=x)
    require(x.dim() > 1, name, f"input must have 2 dimensions or more, it is {shape_of(x)}")


def quantize(x: Tensor, inverse: Tensor, offset: Tensor) -> None:
    name = "npu_quantize"
    placed(name, input=x, scales=inverse, zero_points=offset)
    typed(name, HALVES, input=x, scales=inverse, zero_points=offset)
    for part in (inverse, offset):
        require(
            tuple(part.shape) in ((1,), tuple(x.shape[-1:])),
            name,
            f"scales and zero_points must be [1] or {shape_of(x)[-1:]}, one is {shape_of(part)}",
        )


def format_cast(x: Tensor) -> None:
    name = "npu_format_cast"
    placed(name, input=x)
    typed(name, tuple(COLUMN_STEPS), input=x)
    rows, columns = x.shape[-2:]
    step = COLUMN_STEPS[x.dtype]
    require(
        rows % ROW_STEP == 0 and columns % step == 0,
        name,
        f"rows and columns must be multiples of {ROW_STEP} and {step}, they are {rows} and "
        f"{columns}",
    )


def quant_matmul(
    x: Tensor,
    columns: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    """x: [tokens, in]; columns: [in, out]; scale, bias: [out]; pertoken_scale: [tokens]."""
    name = "npu_quant_matmul"
    given = {"scale": scale, "pertoken_scale": pertoken_scale, "bias": bias}
    placed(name, x1=x, x2=columns, **given)
    typed(name, (torch.int8,), x1=x, x2=columns)
    typed(name, (torch.float32,), scale=scale)
    require(dtype in HALVES, name, f"output_dtype must be one of {HALVES}, it is {dtype}")
    require(
        x.dim() == 2 and columns.dim() == 2 and x.shape[1] == columns.shape[0],
        name,
        f"x1 must be [tokens, in] and x2 [in, out], they are {shape_of(x)} and {shape_of(columns)}",
    )
    widest = max(columns.shape)
    require(widest <= MOST, name, f"x2 must be at most {MOST} wide and long, it has {widest}")
    outputs = columns.shape[1]
    require(
        tuple(scale.shape) in ((1,), (outputs,)),
        name,
        f"scale must be [1] or [{outputs}], it is {shape_of(scale)}",
    )
    for key, part, size, kind in (
        ("pertoken_scale", pertoken_scale, len(x), torch.float32),
        ("bias", bias, outputs, torch.int32),
    ):
        if part is not None:
            typed(name, (kind,), **{key: part})
            require(
                tuple(part.shape) == (size,),
                name,
                f"{key} must be [{size}], it is {shape_of(part)}",
            )
