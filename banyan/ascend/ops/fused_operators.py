"""The operators of deep_ep (sgl-kernel-npu) that send rows to the ranks of their experts, run these
and bring the sums back: the only place that calls them.

Names and arguments are the library's. With checks on, each call is held against its contract first.
"""

from typing import Any

import torch
from torch import Tensor

from banyan.ascend.ops import fused_contracts
from banyan.ops.experts_api import Ranks
from banyan.platform.base import Fusing

SENT_ALONE = 2
"""The mode whose operator takes room for rows, instead of tokens of a rank."""
_OF_8_BITS = 1


class _Named:
    """What the library asks of a group of ranks: who is in it, and its name."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return self._ranks.rank

    def size(self) -> int:
        return self._ranks.size

    def _get_backend(self, device: torch.device) -> "_Named":
        return self

    def get_hccl_comm_name(self, rank: int) -> str:
        return self._ranks.name


class Fuser:
    """
    Args:
        library: deep_ep, or its emulation.
        mode: which of its operators, 1 or 2.
        limits: of that one.
        is_checked: as for `Operators`.
    """

    def __init__(self, library: Any, mode: int, limits: Fusing, is_checked: bool) -> None:
        self.mode, self.limits = mode, limits
        self._library, self._is_checked = library, is_checked
        self._buffers: dict[str, Any] = {}

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        ranks: Ranks,
        experts: int,
    ) -> Tensor:
        """The sum over a token's experts of weight · down(silu(gate(x)) · up(x)). All ranks bring
        as many tokens. x: [tokens, dim] bf16; ids: [tokens, per_token] int64; weights: as ids,
        fp32; gate_up, down: weights of 8 bits and their scales, as `FusedExperts` lays them out;
        experts: of all ranks. returns: [tokens, dim] bf16."""
        tokens, per_token = ids.shape
        given = (x, ids, weights, *gate_up, *down)
        if self._is_checked:
            fused_contracts.fused_deep_moe(*given, ranks, experts, self.mode, self.limits)
        # The second operator has room for so many rows, which is what may come to one rank at most.
        room = tokens * per_token * ranks.size if self.mode == SENT_ALONE else tokens
        return self._buffer(ranks).fused_deep_moe(
            *given,
            num_max_dispatch_tokens_per_rank=room,
            num_experts=experts,
            quant_mode=_OF_8_BITS,
            fuse_mode=self.mode,
        )[0]

    def _buffer(self, ranks: Ranks) -> Any:
        if ranks.name not in self._buffers:
            self._buffers[ranks.name] = self._library.Buffer(_Named(ranks), low_latency_mode=True)
        return self._buffers[ranks.name]
