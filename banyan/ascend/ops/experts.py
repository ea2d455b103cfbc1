"""Blocks of experts by the NPU's operators: pairs of a token and an expert in the order of the
experts, two products by group, and each token's rows together again. Nothing waits for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ascend.ops.four_bits import product_of
from banyan.ascend.ops.fused import FusedExperts
from banyan.ascend.ops.needs import NpuToolkit, declines
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.padding import filled
from banyan.ops import reference
from banyan.ops.bind import Kernel
from banyan.ops.experts_api import Ranks, StoredExperts
from banyan.ops.stored import stack
from banyan.platform.base import Dispatch


class GroupedExperts:
    """Of this rank, each with both of its first matrices in one."""

    def __init__(
        self,
        operators: Operators,
        limits: Dispatch,
        experts: StoredExperts,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        first, count = experts.first, len(experts.down)
        self._range = (first, first + count, experts.total or count)
        self._operators = operators
        self._limits = limits
        self._activation = experts.activation
        self._clamp = experts.clamp
        pairs = zip(experts.gate, experts.up, strict=True)
        self._gate_up = product_of(operators, [stack(pair) for pair in pairs], dtype, device)
        self._down = product_of(operators, experts.down, dtype, device)
        self._biases: tuple[Tensor, Tensor] | None = None
        if experts.biases is not None:
            gate, up, down = (part.to(device, dtype) for part in experts.biases)
            self._biases = (torch.cat([gate, up], dim=1), down)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        operators, chosen = self._operators, ids.to(torch.int32)
        first, last, total = self._range
        rows, places, counts = operators.init_routing(x.contiguous(), chosen, *self._range)
        inner = self._gate_up(rows, counts)
        outer_bias = None
        if self._biases is not None:
            of_row = self._rows_of(chosen)
            inner = inner + self._biases[0][of_row]
            outer_bias = self._biases[1][of_row]
        outer = self._down(self._gated(inner), counts)
        if outer_bias is not None:
            outer = outer + outer_bias
        weights = weights.to(x.dtype)
        if last - first < total:
            # Behind the rows of the experts here lies anything: not even its zeroth part is added.
            at = torch.arange(len(outer), device=outer.device)
            outer = torch.where((at < counts.sum()).unsqueeze(1), outer, 0)
            places = places.clamp(min=0)
            weights = torch.where((chosen >= first) & (chosen < last), weights, 0)
        return operators.token_unpermute(outer, places, weights)

    def exchanged(
        self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, tokens: int
    ) -> Tensor:
        operators, total, limits = self._operators, self._range[2], self._limits
        x, ids, weights = filled(x, ids, weights, tokens)
        x, chosen = x.contiguous(), ids.to(torch.int32)
        weights = weights.float().contiguous()
        given = (x, chosen, weights, ranks, total, limits)
        sent = operators.dispatch(*given, is_rounded=self._gate_up.rounds)
        inner = self._gate_up(sent.rows, sent.counts, sent.units)
        if self._biases is None:
            outer = self._down(self._gated(inner), sent.counts)
        else:
            at = torch.arange(len(sent.rows), device=x.device)
            of_row = torch.searchsorted(sent.counts.cumsum(0), at, right=True)
            of_row = of_row.clamp(max=len(sent.counts) - 1)
            inner = inner + self._biases[0][of_row]
            outer = self._down(self._gated(inner), sent.counts)
            outer = outer + self._biases[1][of_row]
        return operators.combine(outer, sent, chosen, weights, ranks, total, limits)

    def _rows_of(self, chosen: Tensor) -> Tensor:
        """Of each row: its expert among those here; those of others come last."""
        first, last, _ = self._range
        mine = chosen.flatten() - first
        mine = torch.where((mine >= 0) & (mine < last - first), mine, last - first)
        return mine.sort().values.clamp(max=last - first - 1)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._clamp is not None:
            gate, up = gate_up.chunk(2, dim=-1)
            return reference.clamped_swiglu(gate, up, self._clamp)
        if self._activation == "silu":
            return self._operators.swiglu(gate_up)
        exact = self._activation == "gelu"
        return (reference.gelu_and_mul if exact else reference.gelu_tanh_and_mul)(gate_up)


def _experts(toolkit: NpuToolkit) -> Callable[..., object]:
    def pack(experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> object:
        if toolkit.fuser is not None:
            return FusedExperts(toolkit.operators, toolkit.fuser, experts, dtype, device)
        return GroupedExperts(toolkit.operators, toolkit.limits, experts, dtype, device)

    return pack


experts = Kernel(supports=declines, make=_experts)
