"""What the NPU's products of 8-bit rows by 4-bit weights accept, as `contracts.py` has it. Eight
numbers of an input lie in an int32, those of lower outputs below; weights are counted in a unit of
each 256 inputs and output, whose bits are the lower half of an int64."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import HALVES, placed, require, shape_of, typed

GROUP, IN_WORD = 256, 8
"""Inputs that share a unit, and numbers in an int32."""
MOST_INPUTS = 18432
LOWERED = 8
"""What the operators take from each number of a row; the sum of weights times this puts it back."""


def quant_matmul(
    x: Tensor, columns: Tensor, scale: Tensor, units: Tensor, lift: Tensor, dtype: torch.dtype
) -> None:
    """x: [tokens, in] int8; columns: [in, out / 8]; scale: [in / 256, out]; units: [tokens, 1];
    lift: [out]."""
    name = "npu_quant_matmul"
    placed(name, x1=x, x2=columns, scale=scale, pertoken_scale=units, offset=lift)
    _typed(name, dtype, {"x1": x, "x2": columns, "scale": scale}, offset=lift, pertoken_scale=units)
    _sized(name, x, columns, scale)
    outputs = columns.shape[1] * IN_WORD
    _shaped(name, pertoken_scale=(units, (len(x), 1)), offset=(lift, (outputs,)))


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    scale: Tensor,
    units: Tensor,
    lift: Tensor,
    dtype: torch.dtype,
) -> None:
    """x: [rows, in] int8; weight: [groups, in, out / 8]; counts: [groups]; scale: [groups, in /
    256, out]; units: [rows]; lift: [groups, out]."""
    name = "npu_grouped_matmul"
    given = {"scale": scale, "per_token_scale": units, "bias": lift}
    placed(name, x=x, weight=weight, group_list=counts, **given)
    typed(name, (torch.int64,), group_list=counts)
    _typed(
        name, dtype, {"x": x, "weight": weight, "scale": scale}, bias=lift, per_token_scale=units
    )
    require(
        weight.dim() == 3 and scale.dim() == 3 and len(scale) == len(weight),
        name,
        f"weight and scale must have 3 dimensions and as many groups, they are {shape_of(weight)} "
        f"and {shape_of(scale)}",
    )
    _sized(name, x, weight[0], scale[0])
    groups, outputs = len(weight), weight.shape[2] * IN_WORD
    _shaped(
        name,
        group_list=(counts, (groups,)),
        per_token_scale=(units, (len(x),)),
        bias=(lift, (groups, outputs)),
    )


def _typed(name: str, dtype: torch.dtype, numbers: dict[str, Tensor], **floats: Tensor) -> None:
    kinds = (torch.int8, torch.int32, torch.int64)
    for (key, part), kind in zip(numbers.items(), kinds, strict=True):
        typed(name, (kind,), **{key: part})
    typed(name, (torch.float32,), **floats)
    require(dtype in HALVES, name, f"output_dtype must be one of {HALVES}, it is {dtype}")


def _sized(name: str, x: Tensor, columns: Tensor, scale: Tensor) -> None:
    require(
        x.dim() == 2 and columns.dim() == 2 and x.shape[1] == columns.shape[0],
        name,
        f"rows must be [rows, in] and weights [in, out / {IN_WORD}], they are {shape_of(x)} and "
        f"{shape_of(columns)}",
    )
    inputs = x.shape[1]
    require(
        0 < inputs <= MOST_INPUTS and inputs % GROUP == 0,
        name,
        f"inputs must be a multiple of {GROUP} up to {MOST_INPUTS}, they are {inputs}",
    )
    wanted = (inputs // GROUP, columns.shape[1] * IN_WORD)
    require(
        tuple(scale.shape) == wanted,
        name,
        f"scale must be {list(wanted)}, it is {shape_of(scale)}",
    )


def _shaped(name: str, **parts: tuple[Tensor, tuple[int, ...]]) -> None:
    for key, (part, wanted) in parts.items():
        require(
            tuple(part.shape) == wanted,
            name,
            f"{key} must be {list(wanted)}, it is {shape_of(part)}",
        )
