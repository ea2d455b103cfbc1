"""Norms, rotation and gates in Triton, with the signatures of `ops/api.py`."""

import math

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines, power_of_two

_GATE_BLOCK = 1024


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _norm(x, None, weight, out, None, eps)
    return out


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _norm(x, residual, weight, out, total, eps)
    return out, total


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    from banyan.ops.cuda.kernels import norm

    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    parts, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    block = power_of_two(width)
    norm[(x.shape[0], parts)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        parts,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _turned(q, k, None, 0.0, cos, sin)


def _norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    return _turned(q, k, (q_weight, k_weight), eps, cos, sin)


def _turned(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """weights: of the norms before; None = there are none."""
    from banyan.ops.cuda.kernels import rotate

    (tokens, heads, width), kv_heads = q.shape, k.shape[1]
    pairs = cos.shape[1]
    q_out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, kv_heads, width), dtype=k.dtype, device=k.device)
    rest = width - 2 * pairs
    rotate[(tokens, heads + kv_heads)](
        q,
        k,
        *(weights or (cos, cos)),
        cos.contiguous(),
        sin.contiguous(),
        q_out,
        k_out,
        *q.stride()[:2],
        *k.stride()[:2],
        heads,
        width,
        pairs,
        eps,
        HAS_NORMS=weights is not None,
        BLOCK=power_of_two(pairs),
        REST=power_of_two(rest) if rest else 0,
        num_warps=1,
    )
    return q_out, k_out


def _silu_and_mul(gate_up: Tensor, limit: float = math.inf) -> Tensor:
    from banyan.ops.cuda.kernels import silu_gate

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, -(-width // _GATE_BLOCK))
    is_limited = limit < math.inf
    sizes = (gate_up.stride(0), width, limit if is_limited else 0.0)
    silu_gate[grid](gate_up, out, *sizes, LIMITED=is_limited, BLOCK=_GATE_BLOCK)
    return out


rms_norm = Kernel(supports=declines, run=_rms_norm)
add_rms_norm = Kernel(supports=declines, run=_add_rms_norm)
rotary = Kernel(supports=declines, run=_rotary)
norm_rotary = Kernel(supports=declines, run=_norm_rotary)
silu_and_mul = Kernel(supports=declines, run=_silu_and_mul)
