"""Norms, rotation and gates by the NPU's operators, with the signatures of `ops/api.py`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ascend.ops.toolkit import NpuToolkit, declines
from banyan.ops import reference
from banyan.ops.bind import Kernel


def _rms_norm(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return toolkit.operators.rms_norm(x.contiguous(), weight, eps)

    return run


def _add_rms_norm(toolkit: NpuToolkit) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return toolkit.operators.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    return run


def _silu_and_mul(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    def run(gate_up: Tensor, limit: float = math.inf) -> Tensor:
        if limit < math.inf:
            return reference.silu_and_mul(gate_up, limit)
        return toolkit.operators.swiglu(gate_up.contiguous())

    return run


def _rotary(toolkit: NpuToolkit) -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        # The operator wants one dtype: in x's the angles would be too coarse.
        wide = x[..., :width].unsqueeze(0).float().contiguous()  # [1, tokens, heads, width]
        part = toolkit.operators.rotary_mul(wide, cos, sin).squeeze(0).to(x.dtype)
        return part if width == x.shape[-1] else torch.cat([part, x[..., width:]], dim=-1)

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = [torch.cat([part, part], -1)[None, :, None] for part in (cos, sin)]
        return turned(q, *both), turned(k, *both)

    return run


rms_norm = Kernel(supports=declines, make=_rms_norm)
add_rms_norm = Kernel(supports=declines, make=_add_rms_norm)
silu_and_mul = Kernel(supports=declines, make=_silu_and_mul)
rotary = Kernel(supports=declines, make=_rotary)
