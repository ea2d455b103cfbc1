"""Blocks of experts by one operator of the NPU, which sends rows to the ranks of their experts,
runs these and brings the sums back; weights of 8 bits, as `fused_operators.py` gives them on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from banyan.ascend.ops.fused_operators import SENT_ALONE, Fuser
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.padding import filled
from banyan.base.errors import ConfigError
from banyan.ops.experts_api import Ranks, StoredExperts
from banyan.ops.rounded_inputs import DYNAMIC, Rounding
from banyan.ops.stored import StoredWeight, stack

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
        if why := _obstacle(experts, dtype):
            raise ConfigError(f"{_FLAG}: {why}", hint=_HINT)
        self._fuser = fuser
        self._total = experts.total or len(experts.down)
        pairs = [stack(pair) for pair in zip(experts.gate, experts.up, strict=True)]
        tile, self._is_second = fuser.limits.tile, fuser.mode == SENT_ALONE

        def laid(weights: Sequence[StoredWeight], is_first: bool) -> tuple[Tensor, Tensor]:
            found = [Rounding.of(weight.raw, weight.type) for weight in weights]
            numbers = torch.stack([each.numbers for each in found])  # [experts, out, in]
            scale = torch.stack([each.scale for each in found])
            if is_first and tile:
                numbers, scale = in_turns(numbers, tile), in_turns(scale, tile)
            if is_first or self._is_second:
                numbers = numbers.transpose(1, 2)
            there = operators.cast_fractal(numbers.contiguous().to(device))
            return there, (as_bits(scale) if self._is_second else scale).to(device)

        self._gate_up, self._down = laid(pairs, True), laid(experts.down, False)

    def exchanged(
        self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, tokens: int
    ) -> Tensor:
        x, ids, weights = filled(x, ids, weights, tokens)
        given = (x.contiguous(), ids.contiguous(), weights.float().contiguous())
        return self._fuser(*given, self._gate_up, self._down, ranks, self._total)


def in_turns(numbers: Tensor, tile: int) -> Tensor:
    """Rows of gate and up, which lie behind each other, in pieces of `tile` in turns. numbers:
    [experts, gate and up, …]"""
    count, both, *rest = numbers.shape
    pieces = numbers.view(count, 2, both // (2 * tile), tile, *rest)
    return pieces.transpose(1, 2).reshape(numbers.shape)


def as_bits(scale: Tensor) -> Tensor:
    """The bits of fp32 numbers in the lower half of whole numbers of 64."""
    return scale.float().contiguous().view(torch.int32).long()


def _obstacle(experts: StoredExperts, dtype: torch.dtype) -> str:
    if dtype != torch.bfloat16:
        return f"it computes in bfloat16, activations are {dtype}".replace("torch.", "")
    if not experts.gate or experts.activation != "silu" or experts.clamp is not None:
        return "its experts are silu(gate) · up, those of this model are not"
    if experts.biases is not None:
        return "its experts have no biases, those of this model do"
    stored = {each.type for part in (experts.gate, experts.up, experts.down) for each in part}
    if stored != {DYNAMIC}:
        there = ", ".join(sorted(stored))
        return f"its experts are of 8 bits (modelslim's {DYNAMIC}), those of this model are {there}"
    return ""
