"""Sampling and log-probabilities as torch ops, for devices without a sampler of their own.

All rows at once, and nothing of the size of the vocabulary leaves the device. Tokens equal the
definition in ops/sampling.py bit for bit: each of its roundings is an op of its own here, and
weights are added up as the same integers.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.host_memory import copy_to
from banyan.ops.sampling import (
    GOLDEN,
    MIX,
    PARAMS,
    POWERS,
    VANISHED,
    WEIGHT_BITS,
    Addends,
    Masks,
    SampleRows,
)

_LOW = 0xFFFF_FFFF
_TORCH = {"i": torch.int64, "u": torch.int64, "f": torch.float64, "b": torch.bool}


Draw = Callable[[Tensor, Tensor, Tensor, SampleRows], None]
"""Enters the tokens of the rows that do not take the best one; of (logits after all edits, the
largest of each row, tokens, rows)."""


def _sample(logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    return sampled_by(_draw, logits, rows)


def sampled_by(draw: Draw, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    """What `Ops.sample` returns."""
    edited = edited_logits(logits, rows)
    best, tokens = edited.max(-1)
    if not rows.asked("greedy").all():
        draw(edited, best, tokens, rows)
    tokens = torch.where(best.isfinite(), tokens, 0)
    rows.history[rows.slots, rows.positions] = tokens.to(torch.int32)
    return tokens, best


def field(rows: SampleRows, name: str, where: Tensor | None = None) -> Tensor:
    """One parameter of each row, or of some rows: [n] int64 (seeds as their bits), fp64 or bool."""
    kind, offset = PARAMS.fields[name][:2]  # type: ignore[index]
    slots = rows.slots if where is None else rows.slots[where]
    part = rows.params[slots, offset : offset + kind.itemsize].contiguous()
    return part.view(_TORCH[kind.kind])[:, 0]


def edited_logits(logits: Tensor, rows: SampleRows) -> Tensor:
    """The logits after penalties, bans, masks and biases; `logits` itself if there are none."""
    penalised = np.flatnonzero(rows.asked("penalised"))
    if not len(penalised) and rows.masks is None and rows.addends is None:
        return logits
    edited = logits.clone()
    if len(penalised):
        where = copy_to(penalised, logits.device)
        edited[where] = _penalised(edited[where], rows, where)
    if rows.masks is not None:
        edited.masked_fill_(_banned(rows.masks, logits.shape[1]), -math.inf)
    if rows.addends is not None:
        _add(edited, rows.addends)
    return edited


def _penalised(logits: Tensor, rows: SampleRows, where: Tensor) -> Tensor:
    """logits: [n, vocab], of the rows `where`; the result is new."""
    positions = rows.positions[where].unsqueeze(1)
    longest = rows.longest
    tokens = rows.history[rows.slots[where], :longest].long()  # [n, longest]
    column = torch.arange(longest, device=logits.device)
    is_known = column < positions
    is_output = is_known & (column >= field(rows, "prompt_len", where).unsqueeze(1))
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.float())
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, is_known.float())
    frequency, presence, repetition = (
        field(rows, name, where).float().unsqueeze(1)
        for name in ("frequency", "presence", "repetition")
    )
    less = frequency * counts
    less = less + presence
    logits = torch.where(counts > 0, logits - less, logits)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where((seen > 0) & (repetition != 1.0), scaled, logits)


def _banned(masks: Masks, vocab: int) -> Tensor:
    """[rows, vocab] bool."""
    ids = torch.arange(vocab, device=masks.bits.device)
    mine = masks.bits[masks.of_row.clamp(min=0).long()]  # [rows, bytes]
    is_allowed = (mine[:, ids >> 3] >> (ids & 7).to(torch.uint8)) & 1
    return (masks.of_row >= 0).unsqueeze(1) & (is_allowed == 0)


def _add(logits: Tensor, addends: Addends) -> None:
    count = addends.ids.shape[0]
    rows = torch.arange(logits.shape[0], device=logits.device)
    row_of = rows.repeat_interleave(addends.offsets.diff(), output_size=count)
    logits.index_put_((row_of, addends.ids.long()), addends.values, accumulate=True)


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, rows: SampleRows) -> None:
    drawn = np.flatnonzero(~rows.asked("greedy"))
    where = copy_to(drawn, logits.device)
    is_filtered = bool(((rows.asked("top_k") > 0) | (rows.asked("top_p") < 1.0))[drawn].any())
    part = logits[where] if len(drawn) < len(logits) else logits
    tokens[where] = _drawn(part, rows, where, is_filtered)


def _drawn(logits: Tensor, rows: SampleRows, where: Tensor, is_filtered: bool) -> Tensor:
    """The token of each row at its quantile. logits: [n, vocab], of the rows `where`."""
    below = logits.amax(-1, keepdim=True) - logits
    temperature = field(rows, "temperature", where)
    weight = _weights(below, temperature)
    least = (field(rows, "min_p", where) * (1 << WEIGHT_BITS)).long().unsqueeze(1)
    keep = weight >= least
    if is_filtered:
        last = _last(below, temperature, weight.sum(-1), rows, where)
        keep = keep & (below <= last.unsqueeze(1))
    mass = torch.where(keep, weight, 0).cumsum(-1)
    at = _quantile(field(rows, "seed", where), rows.positions[where])
    wanted = _high_product(mass[:, -1], at).unsqueeze(1)
    return torch.searchsorted(mass, wanted, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def _last(
    below: Tensor, temperature: Tensor, total: Tensor, rows: SampleRows, where: Tensor
) -> Tensor:
    """How far the last token may lie below the best one by top_k and top_p: [n] fp32."""
    vocab = below.shape[1]
    endless = torch.full_like(below[:, 0], math.inf)
    ordered = below.sort(-1).values
    top_k, top_p = field(rows, "top_k", where), field(rows, "top_p", where)
    kth = ordered.gather(1, (top_k - 1).clamp(0, vocab - 1).unsqueeze(1))[:, 0]
    last = torch.where((top_k > 0) & (top_k < vocab), kth, endless)
    wanted = (top_p * total.double()).long().clamp(min=1).unsqueeze(1)
    mass = _weights(ordered, temperature).cumsum(-1)
    index = torch.searchsorted(mass, wanted).clamp(max=vocab - 1)
    reached = ordered.gather(1, index)[:, 0]
    return torch.minimum(last, torch.where(top_p < 1.0, reached, endless))


def _weights(below: Tensor, temperature: Tensor) -> Tensor:
    """`sampling.weights` of whole rows. below: [n, vocab] fp32; temperature: [n] fp64."""
    factor = (-1.4426950408889634 / temperature).float().unsqueeze(1)
    x = (below * factor).clamp(min=-VANISHED)
    n = x.round()
    f = x - n
    p = torch.full_like(f, POWERS[0])
    for power in POWERS[1:]:
        p = p * f
        p = p + power
    weight = (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)
    return (weight.double() * float(1 << WEIGHT_BITS)).round().long()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z shifted right by `bits`, filled with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(MIX[0])
    z = (z ^ _shifted(z, 27)) * _signed(MIX[1])
    return z ^ _shifted(z, 31)


def _quantile(seeds: Tensor, positions: Tensor) -> Tensor:
    """`sampling.quantile`, as the bits of its 64-bit numbers in int64."""
    state = _mixed(seeds + _signed(GOLDEN))
    return _mixed((state ^ positions) + _signed(GOLDEN))


def _high_product(m: Tensor, a: Tensor) -> Tensor:
    """m · a >> 64 for m in [0, 2**63) and the bits of a in [0, 2**64), both int64."""
    m_high, m_low = m >> 32, m & _LOW
    a_high, a_low = _shifted(a, 32), a & _LOW
    middle = m_high * a_low + _shifted(m_low * a_low, 32)
    lower = m_low * a_high + (middle & _LOW)
    return m_high * a_high + _shifted(middle, 32) + _shifted(lower, 32)


def _logprobs(
    logits: Tensor, rows: Tensor, temperatures: Tensor, tokens: Tensor, top: int, picked: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mine = logits[rows]
    best = mine.amax(-1, keepdim=True)
    below = best - mine
    is_finite = best.isfinite()
    # In a row that is no numbers the order means nothing; ids stay inside the vocabulary.
    order = below.nan_to_num(nan=math.inf).sort(dim=-1, stable=True).indices[:, :top]
    ids = torch.where(is_finite, order, 0)
    wanted = torch.cat([tokens.unsqueeze(1), ids, picked], dim=1)
    total = _weights(below, temperatures).sum(-1, keepdim=True).double() / (1 << WEIGHT_BITS)
    near = (mine.gather(1, wanted).double() - best.double()) / temperatures.unsqueeze(1)
    values = torch.where(is_finite, (near - total.log()).float(), math.nan)
    of_token, of_top, of_picked = values.split([1, top, picked.shape[1]], dim=1)
    return of_token[:, 0], ids.to(torch.int32), of_top, of_picked


sample = Kernel(supports=lambda spec: None, run=_sample)
logprobs = Kernel(supports=lambda spec: None, run=_logprobs)
