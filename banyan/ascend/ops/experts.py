"""Blocks of experts by the NPU's operators: by grouped products, or by one fused operator that also
exchanges the rows between ranks. Nothing waits for the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from banyan.ascend.ops.operators import BY_ROWS, Fuser, Operators
from banyan.ascend.ops.products import product_of
from banyan.ascend.ops.toolkit import NpuToolkit, declines
from banyan.base.errors import ConfigError
from banyan.ops import reference
from banyan.ops.activation_quant import DYNAMIC, Rounding
from banyan.ops.bind import Kernel
from banyan.ops.experts_api import Ranks, StoredExperts
from banyan.ops.stored import StoredWeight, stack
from banyan.platform.expert_exchange import Dispatch


def _padded(x: Tensor, ids: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad a step to `tokens`; padding goes to the first experts with weight 0."""
    room, per_token = tokens - len(x), ids.shape[1]
    if not room:
        return x, ids, weights
    others = torch.arange(per_token, device=ids.device).expand(room, -1)
    return pad(x, (0, 0, 0, room)), torch.cat([ids, others]), pad(weights, (0, 0, 0, room))


_FLAG, _HINT = "--moe-a2a-backend ascend_fuseep", "give --moe-a2a-backend deepep"


class FusedExperts:
    """Of this rank.

    Raises:
        ConfigError: experts that the operator does not compute.
    """

    def __init__(
        self,
        operators: Operators,
        fuser: Fuser,
        experts: StoredExperts,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if why := _fused_obstacle(experts, dtype):
            raise ConfigError(f"{_FLAG}: {why}", hint=_HINT)
        self._fuser = fuser
        self._total = experts.total or len(experts.down)
        pairs = [stack(pair) for pair in zip(experts.gate, experts.up, strict=True)]
        tile, self._is_second = fuser.limits.tile, fuser.mode == BY_ROWS

        def laid(weights: Sequence[StoredWeight], is_first: bool) -> tuple[Tensor, Tensor]:
            found = [Rounding.of(weight.raw, weight.type) for weight in weights]
            numbers = torch.stack([each.numbers for each in found])  # [experts, out, in]
            scale = torch.stack([each.scale for each in found])
            if is_first and tile:
                numbers, scale = interleaved(numbers, tile), interleaved(scale, tile)
            if is_first or self._is_second:
                numbers = numbers.transpose(1, 2)
            there = operators.cast_fractal(numbers.contiguous().to(device))
            return there, (as_bits(scale) if self._is_second else scale).to(device)

        self._gate_up, self._down = laid(pairs, True), laid(experts.down, False)

    def exchanged(
        self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, tokens: int
    ) -> Tensor:
        x, ids, weights = _padded(x, ids, weights, tokens)
        given = (x.contiguous(), ids.contiguous(), weights.float().contiguous())
        return self._fuser(*given, self._gate_up, self._down, ranks, self._total)


def interleaved(numbers: Tensor, tile: int) -> Tensor:
    """Interleave the rows of gate and of up, `tile` rows at a time.

    numbers: [experts, gate rows then up rows, …].
    """
    count, both, *rest = numbers.shape
    pieces = numbers.view(count, 2, both // (2 * tile), tile, *rest)
    return pieces.transpose(1, 2).reshape(numbers.shape)


def as_bits(scale: Tensor) -> Tensor:
    """The bits of fp32 numbers in the lower half of whole numbers of 64."""
    return scale.float().contiguous().view(torch.int32).long()


def _fused_obstacle(experts: StoredExperts, dtype: torch.dtype) -> str:
    if dtype != torch.bfloat16:
        return f"it computes in bfloat16, activations are {dtype}".replace("torch.", "")
    if not experts.gate or experts.activation != "silu" or experts.clamp is not None:
        return "its experts are silu(gate) · up, this model's are not"
    if experts.biases is not None:
        return "its experts have no biases, this model's have some"
    stored = {each.type for part in (experts.gate, experts.up, experts.down) for each in part}
    if stored != {DYNAMIC}:
        there = ", ".join(sorted(stored))
        return f"its experts are of 8 bits (modelslim's {DYNAMIC}), this model's are {there}"
    return ""


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
        outer, places, counts = self._outputs(x, chosen)
        weights = weights.to(x.dtype)
        if last - first < total:
            # After the rows of this rank's experts anything may follow, NaN too: a weight of 0
            # is not enough.
            at = torch.arange(len(outer), device=outer.device)
            outer = torch.where((at < counts.sum()).unsqueeze(1), outer, 0)
            places = places.clamp(min=0)
            weights = torch.where((chosen >= first) & (chosen < last), weights, 0)
        return operators.experts.token_unpermute(outer, places, weights)

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        outer, places, _ = self._outputs(x, ids.to(torch.int32))
        at = places.view(-1).long()
        pairs = torch.where((at >= 0).unsqueeze(1), outer[at.clamp(min=0)], 0)
        return pairs.view(len(x), -1)

    def parts(self, at: int) -> list[Tensor]:
        biases = [] if self._biases is None else [part[at] for part in self._biases]
        return [*self._gate_up.parts(at), *self._down.parts(at), *biases]

    def put(self, at: int, parts: list[Tensor]) -> None:
        for mine, new in zip(self.parts(at), parts, strict=True):
            mine.copy_(new)

    def _outputs(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Results by expert, the row of each pair, and how many rows each expert has; see
        `Operators.init_routing`."""
        given = (x.contiguous(), chosen, *self._range)
        rows, places, counts = self._operators.experts.init_routing(*given)
        inner = self._gate_up(rows, counts)
        if self._biases is None:
            return self._down(self._gated(inner), counts), places, counts
        of_row = self._rows_of(chosen)
        inner = inner + self._biases[0][of_row]
        return self._down(self._gated(inner), counts) + self._biases[1][of_row], places, counts

    def exchanged(
        self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, tokens: int
    ) -> Tensor:
        operators, total, limits = self._operators, self._range[2], self._limits
        x, ids, weights = _padded(x, ids, weights, tokens)
        x, chosen = x.contiguous(), ids.to(torch.int32)
        weights = weights.float().contiguous()
        given = (x, chosen, weights, ranks, total, limits)
        sent = operators.experts.dispatch(*given, is_rounded=self._gate_up.rounds)
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
        return operators.experts.combine(outer, sent, chosen, weights, ranks, total, limits)

    def _rows_of(self, chosen: Tensor) -> Tensor:
        """The expert of each row, counted from the first one here; rows of other ranks come
        last."""
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


def _combine_experts(x: Tensor, ids: Tensor, weights: Tensor, home: int) -> Tensor:
    """As `ops.api.Ops.combine_experts`, in fp32 and in the order of the choices; nothing waits."""
    pairs = x.unflatten(1, (ids.shape[1], -1)).float()
    return (pairs * weights.unsqueeze(-1)).sum(1).to(x.dtype)


experts = Kernel(supports=declines, make=_experts)
combine_experts = Kernel(supports=declines, run=_combine_experts)
