"""The compiled row-wise ops: norms, rotation, activations, moving rows; fp32 activations.

Each method implements the op of the same name in `ops/api.py`. It only allocates the result and
appends the op, so a call inside a recording is recorded.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library

_SILU, _GELU, _GELU_TANH = range(3)  # curves of bn_gate_and_mul


class RowMoves:
    """Ops that move rows."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        tokens, width = parts[0].shape[0], sum(part.shape[-1] for part in parts)
        out = self._library.empty((tokens, width))
        first = 0
        for part in parts:
            columns = out[:, first : first + part.shape[-1]]
            self._library.call(
                "bn_copy_columns", tokens, *_rows(part), *_rows(columns), part.shape[-1]
            )
            first += part.shape[-1]
        return out

    def spread_columns(self, x: Tensor, columns: Tensor, width: int) -> Tensor:
        assert columns.dtype == torch.int64 and columns.is_contiguous()
        out = self._library.empty((x.shape[0], width))
        self._library.call(
            "bn_spread_columns",
            x.shape[0],
            *_rows(x),
            columns.data_ptr(),
            out.data_ptr(),
            x.shape[1],
            width,
        )
        return out

    def select_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """x[index].

        x: [tokens, dim] fp32; index: [outputs] int32 or int64.
        returns: [outputs, dim] fp32.
        """
        outputs, dim = index.shape[0], x.shape[1]
        out = self._library.empty((outputs, dim))
        self._library.call(
            "bn_select_rows",
            outputs,
            *_rows(x),
            index.data_ptr(),
            int(index.dtype == torch.int64),
            out.data_ptr(),
            dim,
        )
        return out

    def take_rows(self, x: Tensor, where: Tensor, rows: Tensor, adds: bool = False) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call(
            "bn_take_rows",
            x.shape[0],
            *_rows(x),
            _whole_int32(where),
            *_rows(rows),
            out.data_ptr(),
            x.shape[1],
            int(adds),
        )
        return out


class Rows(RowMoves):
    """Norms, rotation and activations."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        heads = x.shape[1] if x.dim() == 3 else 1
        out = self._library.empty(x.shape)
        self._norm(x, None, weight, out, None, heads, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = self._library.empty(x.shape), self._library.empty(x.shape)
        self._norm(x, residual, weight, out, total, 1, eps)
        return out, total

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        out: Tensor,
        total: Tensor | None,
        heads: int,
        eps: float,
    ) -> None:
        self._library.call(
            "bn_rms_norm",
            x.shape[0],
            *_rows(x),
            *((0, 0) if residual is None else _rows(residual)),
            _whole(weight),
            out.data_ptr(),
            0 if total is None else total.data_ptr(),
            heads,
            x.shape[-1],
            eps,
        )

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call(
            "bn_layer_norm",
            x.shape[0],
            *_rows(x),
            _whole(weight),
            0 if bias is None else _whole(bias),
            out.data_ptr(),
            x.shape[-1],
            eps,
        )
        return out

    def rotary_angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        magnitude: float,
        shifts: Tensor | None = None,
        axes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        shape = (positions.shape[0], frequencies.shape[0])
        cos, sin = self._library.empty(shape), self._library.empty(shape)
        self._library.call(
            "bn_rotary_angles",
            positions.shape[0],
            positions.data_ptr(),
            _whole(frequencies),
            cos.data_ptr(),
            sin.data_ptr(),
            frequencies.shape[0],
            magnitude,
            0 if shifts is None else _whole_int32(shifts),
            0 if axes is None else _whole_int32(axes),
            0 if shifts is None else shifts.shape[1],
        )
        return cos, sin

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = self._library.empty(x.shape)
        tokens, heads, dim = x.shape
        self._library.call(
            "bn_rotary",
            tokens,
            *_rows(x),
            _whole(cos),
            _whole(sin),
            out.data_ptr(),
            heads,
            dim,
            cos.shape[-1],
        )
        return out

    def silu_and_mul(self, gate_up: Tensor, limit: float = math.inf) -> Tensor:
        return self._gate(_SILU, gate_up, limit)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(_GELU, gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(_GELU_TANH, gate_up)

    def _gate(self, curve: int, gate_up: Tensor, limit: float = math.inf) -> Tensor:
        tokens, width = gate_up.shape
        out = self._library.empty((tokens, width // 2))
        self._library.call(
            "bn_gate_and_mul",
            tokens,
            curve,
            *_rows(gate_up),
            out.data_ptr(),
            width // 2,
            limit,
        )
        return out

    def gelu_tanh(self, x: Tensor) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call("bn_gelu_tanh", x.shape[0], *_rows(x), out.data_ptr(), x.shape[-1])
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call("bn_add", x.shape[0], *_rows(x), *_rows(y), out.data_ptr(), x.shape[-1])
        return out

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        out = self._library.empty(x.shape)
        self._library.call(
            "bn_sigmoid_scale",
            x.shape[0],
            *_rows(x),
            *_rows(gate),
            out.data_ptr(),
            x.shape[1],
            gate.shape[1],
        )
        return out

    def scale_logits(self, logits: Tensor, scale: float, soft_cap: float) -> Tensor:
        out = self._library.empty(logits.shape)
        self._library.call(
            "bn_scale_logits",
            logits.shape[0],
            *_rows(logits),
            out.data_ptr(),
            logits.shape[-1],
            scale,
            soft_cap,
        )
        return out


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and token stride of fp32 rows; each row must be contiguous."""
    assert x.dtype == torch.float32, f"expected fp32 rows, got {x.dtype}"
    inside = x.stride()[1:]
    assert inside == ((1,) if x.dim() == 2 else (x.shape[2], 1)), f"rows lie apart inside: {inside}"
    return x.data_ptr(), x.stride(0)


def _whole(x: Tensor) -> int:
    """Address of a contiguous fp32 tensor."""
    assert x.dtype == torch.float32 and x.is_contiguous(), (
        f"expected contiguous fp32, got {x.dtype}"
    )
    return x.data_ptr()


def _whole_int32(x: Tensor) -> int:
    """Address of a contiguous int32 tensor."""
    assert x.dtype == torch.int32 and x.is_contiguous(), f"expected contiguous int32, got {x.dtype}"
    return x.data_ptr()


def _supports(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


def _kernel(method: Callable[..., object]) -> Kernel:
    return Kernel(supports=_supports, make=lambda library: method.__get__(Rows(library)))


rms_norm = _kernel(Rows.rms_norm)
add_rms_norm = _kernel(Rows.add_rms_norm)
layer_norm = _kernel(Rows.layer_norm)
add = _kernel(Rows.add)
rotary_angles = _kernel(Rows.rotary_angles)
rotary = _kernel(Rows.rotary)
silu_and_mul = _kernel(Rows.silu_and_mul)
gelu_and_mul = _kernel(Rows.gelu_and_mul)
gelu_tanh_and_mul = _kernel(Rows.gelu_tanh_and_mul)
gelu_tanh = _kernel(Rows.gelu_tanh)
concat = _kernel(Rows.concat)
sigmoid_scale = _kernel(Rows.sigmoid_scale)
scale_logits = _kernel(Rows.scale_logits)
select_rows = _kernel(Rows.select_rows)
take_rows = _kernel(Rows.take_rows)
spread_columns = _kernel(Rows.spread_columns)
