"""Ops of layers that keep a state in Triton (state spaces, linear attention, short convolutions).

Nothing waits for the device, and grids depend on the numbers of rows and tokens, never on lengths,
so launches can be captured. The state of a row is divided among programs; each walks the row's
tokens in order.
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines, power_of_two
from banyan.ops.state_api import StateRows

_BLOCK = 1024
"""Numbers of a token in a program of a gate."""
_CURVES = {"": 0, "silu": 1, "sigmoid": 2, "relu": 3}
_CHANNELS, _TOKENS = 128, 32
"""A program of a convolution: channels, and tokens of long rows."""
_STATE, _MOST_VALUES, _WARPS = 1024, 8, 1
"""Numbers of a state in a program, the most value dimensions of them, and warps: one warp reduces
them without waiting for another."""


def _apply_gate(x: Tensor, gate: Tensor, curve: str) -> Tensor:
    from banyan.ops.cuda.state_kernels import gate_rows

    tokens, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    block = min(_BLOCK, power_of_two(size))
    gate_rows[(tokens, -(-size // block))](
        x,
        gate,
        out,
        *x.stride(),
        *gate.stride(),
        size,
        CURVE=_CURVES[curve],
        BLOCK=block,
        num_warps=max(1, block // 256),
    )
    return out


def _decay_gates(
    x: Tensor, bias: Tensor, rate: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    from banyan.ops.cuda.state_kernels import decay

    tokens, size = x.shape
    assert x.stride(1) == 1, f"{x.stride()}"
    step, kept = torch.empty((2, tokens, size), dtype=torch.float32, device=x.device)
    if not tokens:
        return step, kept
    block = min(_BLOCK, power_of_two(size))
    grid = (tokens, -(-size // block))
    sizes = (x.stride(0), size, low, high)
    decay[grid](x, bias, rate, step, kept, *sizes, BLOCK=block, num_warps=max(1, block // 256))
    return step, kept


def _where(rows: StateRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A kernel's pointers of rows; without checkpoints it does not read the last one."""
    checkpoints = rows.rollback_checkpoints
    lengths = (rows.row_starts, rows.context_lengths)
    return rows.pages, *lengths, rows.pages if checkpoints is None else checkpoints


def _short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    last_inputs: Tensor,
    rows: StateRows,
) -> Tensor:
    from banyan.ops.cuda.state_kernels import convolve, shift_inputs

    (tokens, channels), taps, count = x.shape, len(weight), len(rows.context_lengths)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    assert x.stride(1) == 1, f"{x.stride()}"
    where, is_whole = _where(rows), tokens <= count
    block = min(_CHANNELS, power_of_two(channels))
    parts = -(-channels // block)
    has_checkpoints = rows.rollback_checkpoints is not None
    sizes = {
        "HAS_CHECKPOINTS": has_checkpoints,
        "TAPS": taps,
        "KEPT": power_of_two(taps),
        "CHANNELS": block,
    }
    strides = (*last_inputs.stride()[:2], rows.pages.stride(0))
    blocks = count if is_whole else tokens // _TOKENS + count
    convolve[(blocks, parts)](
        x,
        weight,
        x if bias is None else bias,
        out,
        last_inputs,
        *where,
        count,
        channels,
        x.stride(0),
        weight.stride(0),
        *strides,
        HAS_BIAS=bias is not None,
        HAS_SILU=has_silu,
        TOKENS=1 if is_whole else _TOKENS,
        IS_WHOLE=is_whole,
        **sizes,
        num_warps=1 if is_whole else 4,
    )
    if not is_whole:
        sides = (*where, channels, x.stride(0), *strides)
        shift_inputs[(count, parts)](x, last_inputs, *sides, **sizes, num_warps=1)
    return out


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    strength: Tensor,
    skip: Tensor | None,
    has_delta: bool,
    states: Tensor,
    rows: StateRows,
) -> Tensor:
    from banyan.ops.cuda.state_kernels import scan_rows

    (tokens, heads, value_dim), (key_heads, key_dim) = v.shape, q.shape[1:]
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if not tokens:
        return out
    assert q.stride(2) == k.stride(2) == v.stride(2) == kept.stride(-1) == 1
    assert strength.stride(1) == states.stride(3) == 1
    keys = power_of_two(key_dim)
    values = min(_MOST_VALUES, power_of_two(value_dim), max(1, _STATE // keys))
    scan_rows[(-(-value_dim // values), len(rows.context_lengths), heads)](
        q,
        k,
        v,
        kept,
        strength,
        strength if skip is None else skip,
        out,
        states,
        *_where(rows),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *kept.stride()[:2],
        strength.stride(0),
        *states.stride()[:3],
        rows.pages.stride(0),
        heads,
        heads // key_heads,
        key_dim,
        value_dim,
        HAS_CHECKPOINTS=rows.rollback_checkpoints is not None,
        HAS_DELTA=has_delta,
        HAS_SKIP=skip is not None,
        BY_KEY=kept.dim() == 3,
        KEYS=keys,
        VALUES=values,
        num_warps=_WARPS,
    )
    return out


def _selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    states: Tensor,
    rows: StateRows,
) -> Tensor:
    from banyan.ops.cuda.state_kernels import scan_channels

    (tokens, channels), key_dim = v.shape, q.shape[1]
    out = torch.empty((tokens, channels), dtype=v.dtype, device=v.device)
    if not tokens:
        return out
    assert q.stride(1) == k.stride(1) == v.stride(1) == step.stride(1) == 1
    keys = power_of_two(key_dim)
    block = min(power_of_two(channels), max(1, _STATE // keys))
    scan_channels[(-(-channels // block), len(rows.context_lengths))](
        q,
        k,
        v,
        step,
        rate,
        skip,
        out,
        states,
        *_where(rows),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        step.stride(0),
        rate.stride(0),
        *states.stride()[:2],
        rows.pages.stride(0),
        key_dim,
        channels,
        HAS_CHECKPOINTS=rows.rollback_checkpoints is not None,
        KEYS=keys,
        CHANNELS=block,
        num_warps=1,
    )
    return out


apply_gate = Kernel(supports=declines, run=_apply_gate)
decay_gates = Kernel(supports=declines, run=_decay_gates)
short_conv = Kernel(supports=declines, run=_short_conv)
scan = Kernel(supports=declines, run=_scan)
selective_scan = Kernel(supports=declines, run=_selective_scan)
