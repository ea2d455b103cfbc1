"""The ops of `ops/state_api.py` in plain torch: the definition of correct. Simple and in fp32, not
quick: rows and their tokens are taken one by one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops.state_api import StateRows


def apply_gate(x: Tensor, gate: Tensor, curve: str) -> Tensor:
    curves = {"silu": functional.silu, "sigmoid": torch.sigmoid, "relu": torch.relu}
    return x * (curves[curve](gate) if curve else gate)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    last_inputs: Tensor,
    rows: StateRows,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.shape[0]
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        before = torch.zeros_like(last_inputs[page]) if is_fresh else last_inputs[page]
        seen = torch.cat([before, x[tokens].float()])  # [taps − 1 + count, channels]
        count = tokens.stop - tokens.start
        total = torch.zeros(count, x.shape[1], device=x.device)
        if bias is not None:
            total = total + bias
        for i in range(taps):
            total = total + weight[i] * seen[i : i + count]
        out[tokens] = (functional.silu(total) if has_silu else total).to(x.dtype)
        last_inputs[page] = seen[count:]
        for t, kept in rollback_checkpoint.items():
            last_inputs[kept] = seen[t + 1 - tokens.start :][: taps - 1]
    return out


def decay_gates(
    x: Tensor, bias: Tensor, rate: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    step = functional.softplus(x.float() + bias).clamp(low, high)
    return step, torch.exp(-rate * step)


def scan(
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
    shared = v.shape[1] // q.shape[1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    wide_q, wide_k = (part.float().repeat_interleave(shared, 1).unsqueeze(-1) for part in (q, k))
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        state = torch.zeros_like(states[page]) if is_fresh else states[page].clone()
        for t in range(tokens.start, tokens.stop):
            value, force = v[t].float(), strength[t].unsqueeze(-1)
            state = kept[t].view(len(value), -1, 1) * state
            if has_delta:
                added = force.sigmoid() * (value - (wide_k[t] * state).sum(1))
            else:
                added = force * value
            state = state + wide_k[t] * added.unsqueeze(1)
            read = (wide_q[t] * state).sum(1)
            out[t] = (read if skip is None else read + skip.unsqueeze(-1) * value).to(v.dtype)
            if t in rollback_checkpoint:
                states[rollback_checkpoint[t]] = state
        states[page] = state
    return out


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    states: Tensor,
    rows: StateRows,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        state = torch.zeros_like(states[page]) if is_fresh else states[page].clone()
        for t in range(tokens.start, tokens.stop):
            value = v[t].float()
            moved = k[t].float().unsqueeze(1) * (step[t] * value)
            state = torch.exp(-rate * step[t]) * state + moved
            out[t] = ((q[t].float().unsqueeze(1) * state).sum(0) + skip * value).to(v.dtype)
            if t in rollback_checkpoint:
                states[rollback_checkpoint[t]] = state
        states[page] = state
    return out


def _walk(rows: StateRows) -> Iterator[tuple[int, slice, bool, dict[int, int]]]:
    """Page, tokens, whether it begins at position 0, and tokens -> further pages that have the
    state after them, of each row that has tokens."""
    pages = rows.pages.tolist()  # sync: the reference walks the rows one by one
    starts = rows.row_starts.tolist()  # sync: as above
    contexts = rows.context_lengths.tolist()  # sync: as above
    rollback_checkpoints = (
        [] if rows.rollback_checkpoints is None else rows.rollback_checkpoints.tolist()
    )  # sync: as above
    for row, context in enumerate(contexts):
        first, end = starts[row : row + 2]
        if end > first:
            page, count = rollback_checkpoints[row] if rollback_checkpoints else (0, 0)
            rollback_checkpoint = {end - 1 - count + at: page + at for at in range(count)}
            yield pages[row], slice(first, end), context == 0, rollback_checkpoint
