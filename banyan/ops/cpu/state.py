"""The compiled ops of layers that keep a running state; fp32 activations, fp32 or bf16 states.

Each method implements the op of the same name in `ops/state_api.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.state_api import StateRows

_CURVES = ("", "silu", "sigmoid", "relu")
_MAX_CONV_KERNEL = 16


class States:
    def __init__(self, library: Library) -> None:
        self._library = library

    def apply_gate(self, x: Tensor, gate: Tensor, curve: str) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call(
            "bn_apply_gate",
            x.shape[0],
            _CURVES.index(curve),
            *_rows(x),
            *_rows(gate),
            out.data_ptr(),
            x.shape[1],
        )
        return out

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        has_silu: bool,
        last_inputs: Tensor,
        rows: StateRows,
    ) -> Tensor:
        (tokens, channels), conv_kernel = x.shape, weight.shape[0]
        assert conv_kernel <= _MAX_CONV_KERNEL, (
            f"a kernel of {conv_kernel}, at most {_MAX_CONV_KERNEL}"
        )
        out = self._library.empty(x.shape)
        self._library.call(
            "bn_short_conv",
            tokens,
            *_places(rows),
            *_rows(x),
            _whole(weight),
            0 if bias is None else _whole(bias),
            out.data_ptr(),
            _whole(last_inputs),
            channels,
            conv_kernel,
            int(has_silu),
            rows=rows.context_lengths.shape[0],
        )
        return out

    def decay_gates(
        self, x: Tensor, bias: Tensor, rate: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        step, kept = self._library.empty(x.shape), self._library.empty(x.shape)
        self._library.call(
            "bn_decay_gates",
            x.shape[0],
            *_rows(x),
            _whole(bias),
            _whole(rate),
            step.data_ptr(),
            kept.data_ptr(),
            x.shape[1],
            low,
            high,
        )
        return step, kept

    def scan(
        self,
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
        tokens, heads, value_dim = v.shape
        key_heads, key_dim = q.shape[1:]
        out = self._library.empty(v.shape)
        self._library.call(
            "bn_scan",
            tokens,
            *_places(rows),
            *_rows(q),
            *_rows(k),
            *_rows(v),
            _whole(kept),
            *_rows(strength),
            0 if skip is None else _whole(skip),
            out.data_ptr(),
            _state_pages(states),
            heads,
            heads // key_heads,
            key_dim,
            value_dim,
            int(has_delta),
            int(kept.dim() == 3),
            int(states.dtype == torch.bfloat16),
            rows=rows.context_lengths.shape[0],
        )
        return out

    def selective_scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        rate: Tensor,
        skip: Tensor,
        states: Tensor,
        rows: StateRows,
    ) -> Tensor:
        (tokens, channels), key_dim = v.shape, q.shape[1]
        out = self._library.empty(v.shape)
        self._library.call(
            "bn_selective_scan",
            tokens,
            *_places(rows),
            *_rows(q),
            *_rows(k),
            *_rows(v),
            *_rows(step),
            _whole(rate),
            _whole(skip),
            out.data_ptr(),
            _state_pages(states),
            channels,
            key_dim,
            int(states.dtype == torch.bfloat16),
            rows=rows.context_lengths.shape[0],
        )
        return out


def _places(rows: StateRows) -> tuple[int, int, int, int, int]:
    starts, contexts, rollback_checkpoints = rows.row_starts, rows.context_lengths, 0
    assert starts.is_contiguous() and contexts.is_contiguous()
    if rows.rollback_checkpoints is not None:
        assert (
            rows.rollback_checkpoints.is_contiguous()
            and rows.rollback_checkpoints.dtype == torch.int32
        )
        rollback_checkpoints = rows.rollback_checkpoints.data_ptr()
    pages = (rows.pages.data_ptr(), rows.pages.stride(0))
    return *pages, starts.data_ptr(), contexts.data_ptr(), rollback_checkpoints


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and token stride of fp32 rows; each row must be contiguous."""
    assert x.dtype == torch.float32, f"expected fp32 rows, got {x.dtype}"
    inside = x.stride()[1:]
    assert inside == ((1,) if x.dim() == 2 else (x.shape[2], 1)), f"rows lie apart inside: {inside}"
    return x.data_ptr(), x.stride(0)


def _whole(x: Tensor) -> int:
    assert x.dtype == torch.float32 and x.is_contiguous(), f"expected whole fp32, got {x.dtype}"
    return x.data_ptr()


def _state_pages(states: Tensor) -> int:
    is_known = states.dtype in (torch.float32, torch.bfloat16)
    assert is_known and states.is_contiguous(), f"expected whole fp32 or bf16, got {states.dtype}"
    return states.data_ptr()


def _supports(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    if spec.dtype != torch.float32:
        return f"computes in fp32, activations are {spec.dtype}"
    return None


def _kernel(method: Callable[..., object]) -> Kernel:
    return Kernel(supports=_supports, make=lambda library: method.__get__(States(library)))


apply_gate = _kernel(States.apply_gate)
short_conv = _kernel(States.short_conv)
decay_gates = _kernel(States.decay_gates)
scan = _kernel(States.scan)
selective_scan = _kernel(States.selective_scan)
