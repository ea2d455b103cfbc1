"""Rounding of floats to the few bits of a storage type or of integers that share scales.

Every value gets the nearest level; of several scales, the one with the smallest squared error is
chosen. There is no calibration: activations are not considered.

Functions named to_… convert values [rows, inputs] fp32 to blocks or numbers, each row on its own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from banyan.ops import blocks
from banyan.ops.blocks import BLOCK, SUPER_BLOCK

_TINY = 2.0**-24
"""The smallest fp16 number above zero."""
_MOST = 65504.0
_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84)
"""Parts of the value range for which scales are tried; values outside are clipped."""
FP8_MOST = 448.0


def _stored_scale(scale: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Positive scales rounded to their stored type: fp16, then `dtype`; never zero."""
    return scale.clamp(_TINY, _MOST).half().to(dtype).float()


def _signed(scale: Tensor) -> Tensor:
    """Scales of any sign rounded to fp16."""
    return torch.where(scale < 0, -1.0, 1.0) * _stored_scale(scale.abs())


def _nearest(values: Tensor, scales: Sequence[Tensor], low: int, high: int):
    """Levels [n, group] and scales [n, 1] of the smallest squared error; values: [n, group]."""
    levels = scale = error = None
    for tried in scales:
        found = (values / tried).round_().clamp_(low, high)
        lost = (found * tried - values).square_().sum(1, keepdim=True)
        if levels is None or scale is None or error is None:
            levels, scale, error = found, tried, lost
            continue
        is_better = lost < error
        levels = torch.where(is_better, found, levels)
        scale = torch.where(is_better, tried, scale)
        error = torch.where(is_better, lost, error)
    assert levels is not None and scale is not None
    return levels, scale


def to_integers(values: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Integers around zero, [rows, inputs] int8, and their scales [rows, inputs/group] fp32.

    Args:
        group: inputs that share a scale; they divide the row.
        dtype: number type of the scales, in addition to fp16.
    """
    rows, inputs = values.shape
    pieces = values.reshape(-1, group)
    half = 1 << (bits - 1)
    largest = pieces.abs().amax(1, keepdim=True)
    if bits == 8:
        tried = [_stored_scale(largest / (half - 1), dtype)]
    else:
        tops = (half - 1.0, half - 0.5, half + 0.0, half + 0.5, half + 1.0)
        tried = [_stored_scale(largest / top, dtype) for top in tops]
    levels, scale = _nearest(pieces, tried, 1 - half if bits == 8 else -half, half - 1)
    return levels.to(torch.int8).view(rows, inputs), scale.view(rows, -1)


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """e4m3 numbers [rows, inputs] and a scale for each row [rows, 1] fp32."""
    scale = _stored_scale(values.abs().amax(1, keepdim=True) / FP8_MOST, dtype)
    return _as_fp8(values / scale), scale


def to_fp8_blocks(values: Tensor, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """e4m3 numbers and a scale for each block of side × side, [rows/side, inputs/side] fp32."""
    rows, inputs = values.shape
    tall, wide = -(-rows // side), -(-inputs // side)
    padded = torch.zeros(tall * side, wide * side)
    padded[:rows, :inputs] = values
    largest = padded.view(tall, side, wide, side).abs().amax((1, 3))
    scale = _stored_scale(largest / FP8_MOST, dtype)
    spread = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)[:rows, :inputs]
    return _as_fp8(values / spread), scale


def _as_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)


def _to_q8_0(values: Tensor) -> Tensor:
    levels, scale = _nearest(values, [_stored_scale(_largest(values) / 127)], -127, 127)
    return blocks.lay_q8_0(levels.to(torch.int8), scale.half())


def _around_zero(values: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Levels from -half up; the value that is farthest from zero may have the one level more."""
    farthest = values.gather(1, values.abs().argmax(1, keepdim=True))
    scales = [_signed(farthest * share / -half) for share in _SHARES]
    return _nearest(values, scales, -half, half - 1)


def _to_q4_0(values: Tensor) -> Tensor:
    levels, scale = _around_zero(values, 8)
    return blocks.lay_q4_0((levels + 8).byte(), scale.half())


def _to_q5_0(values: Tensor) -> Tensor:
    levels, scale = _around_zero(values, 16)
    return blocks.lay_q5_0((levels + 16).byte(), scale.half())


def _from_a_minimum(values: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels 0…top [n, 32] uint8, fp16 scales and minima [n, 1] of scale · level + minimum."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    minimum = low.clamp(-_MOST, _MOST).half().float()
    scale = _stored_scale((high - minimum) / top)
    levels = ((values - minimum) / scale).round_().clamp_(0, top)
    return levels.byte(), scale.half(), minimum.half()


def _to_q4_1(values: Tensor) -> Tensor:
    return blocks.lay_q4_1(*_from_a_minimum(values, 15))


def _to_q5_1(values: Tensor) -> Tensor:
    return blocks.lay_q5_1(*_from_a_minimum(values, 31))


def _by_minima(values: Tensor, top: int) -> tuple[Tensor, ...]:
    """Of super-blocks with 8 groups of 32: levels 0…top [n, 8, 32], scales and minima of 6 bits
    [n, 8], what both are counted in [n, 1] fp16."""
    groups = values.view(-1, 8, 32)
    low = groups.amin(2).clamp(max=0)
    high = groups.amax(2).clamp(min=0)
    best = error = None
    for share in _SHARES:
        scale, minimum = (high - low) * share / top, -low * share
        safe = scale.clamp(min=1e-30).unsqueeze(2)
        levels = ((groups + minimum.unsqueeze(2)) / safe).round_().clamp_(0, top)
        lost = (levels * safe - minimum.unsqueeze(2) - groups).square_().sum(2)
        is_better = torch.ones_like(lost, dtype=torch.bool) if error is None else lost < error
        best = torch.where(is_better, share, 1.0 if best is None else best)
        error = lost if error is None else torch.minimum(lost, error)
    assert best is not None
    scale, minimum = (high - low) * best / top, -low * best
    units = [_stored_scale(each.amax(1, keepdim=True) / 63) for each in (scale, minimum)]
    six = [
        (each / unit).round_().clamp_(0, 63)
        for each, unit in zip((scale, minimum), units, strict=True)
    ]
    step = (units[0] * six[0]).unsqueeze(2)
    levels = (groups + (units[1] * six[1]).unsqueeze(2)) / step.clamp(min=1e-30)
    levels = torch.where(step > 0, levels.round_().clamp_(0, top), 0.0)
    return levels.byte(), six[0].byte(), six[1].byte(), units[0].half(), units[1].half()


def _to_q4_k(values: Tensor) -> Tensor:
    return blocks.lay_q4_k(*_by_minima(values, 15))


def _to_q5_k(values: Tensor) -> Tensor:
    return blocks.lay_q5_k(*_by_minima(values, 31))


def _to_q6_k(values: Tensor) -> Tensor:
    groups = values.view(-1, 16)
    _, scale = _around_zero(groups, 32)
    scale = scale.view(-1, 16)
    unit = _stored_scale(scale.abs().amax(1, keepdim=True) / 127)
    eight = (scale / unit).round_().clamp_(-127, 127)
    step = (unit * eight).view(-1, 1)
    levels = groups / torch.where(step == 0, 1.0, step)
    levels = torch.where(step == 0, 0.0, levels.round_().clamp_(-32, 31))
    return blocks.lay_q6_k((levels + 32).byte().view(-1, 256), eight.to(torch.int8), unit.half())


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax(1, keepdim=True)


TO_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q8_0": (BLOCK, _to_q8_0),
    "Q4_0": (BLOCK, _to_q4_0),
    "Q4_1": (BLOCK, _to_q4_1),
    "Q5_0": (BLOCK, _to_q5_0),
    "Q5_1": (BLOCK, _to_q5_1),
    "Q4_K": (SUPER_BLOCK, _to_q4_k),
    "Q5_K": (SUPER_BLOCK, _to_q5_k),
    "Q6_K": (SUPER_BLOCK, _to_q6_k),
}
"""Storage type -> values of its blocks, and [n, these] fp32 -> [n, bytes of one block] uint8."""


def to_blocks(values: Tensor, type: str) -> Tensor:
    """[rows, inputs] fp32 -> [rows, bytes of a row] uint8; rows are whole blocks of `type`."""
    size, make = TO_BLOCKS[type]
    return make(values.reshape(-1, size)).view(len(values), -1)
