"""The NPU's operators by which ranks exchange the rows of experts: what they do, what they refuse.

Sizes are fixed: what each rank gives is known to all of them, and lies behind each other here. Rows
that nobody has sent hold anything.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from banyan.ascend.ops import product_contracts
from banyan.ascend.ops.contracts import require
from banyan.ascend.ops.product_contracts import MIB, dispatch_of
from banyan.ops.experts_api import Ranks
from tests.ascend.emulation.groups import Exchanges

_DISPATCH, _COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
_COUNTS = (
    "int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, "
)
_RANKS = "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, "
SCHEMAS = {
    _DISPATCH: f"(Tensor x, Tensor expert_ids, {_RANKS}Tensor? scales=None, "
    "Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, "
    f"Tensor? performance_info=None, str group_tp='', {_COUNTS}int shared_expert_rank_num=0, "
    "int quant_mode=0, int global_bs=0, int expert_token_nums_type=1, str comm_alg='', "
    "int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, "
    "int? x_dtype=None, int? scales_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _COMBINE: "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    f"Tensor ep_send_counts, Tensor expert_scales, {_RANKS}Tensor? tp_send_counts=None, "
    "Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, "
    "Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, "
    "Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
    f"Tensor? performance_info=None, str group_tp='', {_COUNTS}int shared_expert_rank_num=0, "
    "int global_bs=0, int comm_quant_mode=0, str comm_alg='', int zero_expert_num=0, "
    "int copy_expert_num=0, int const_expert_num=0) -> Tensor",
}
_ANYTHING = float("nan")
_INFO = 128
"""Numbers that each row brings along for its way back."""
_USUAL = {"shared_expert_num": 1, "expert_token_nums_type": 1}


class Distributed:
    """The operators by their names.

    Args:
        chip: as the driver names it.
    """

    def __init__(self, core: ModuleType, exchanges: Exchanges, chip: str) -> None:
        self._host: Callable[..., Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias
        self._exchanges = exchanges
        self._limits = dispatch_of(chip)

    def npu_moe_distribute_dispatch_v2(
        self,
        x: Tensor,
        expert_ids: Tensor,
        group_ep: str,
        ep_world_size: int,
        ep_rank_id: int,
        moe_expert_num: int,
        *,
        expert_scales: Tensor | None = None,
        quant_mode: int = 0,
        **given: object,
    ) -> tuple[Tensor, ...]:
        ranks, limits = Ranks(group_ep, ep_rank_id, ep_world_size), self._limits
        self._given(_DISPATCH, given, expert_scales)
        weights = expert_scales if expert_scales is not None else expert_ids.float()
        where = (ranks, moe_expert_num, limits)
        product_contracts.distribute_dispatch(x, expert_ids, weights, *where)
        tokens, per_token = expert_ids.shape
        self._fits(ranks, tokens, x.shape[1], per_token, moe_expert_num)
        local = moe_expert_num // ep_world_size
        room = tokens * ep_world_size * min(local, per_token)
        require(quant_mode in (0, 2), _DISPATCH, f"quant_mode is 0 or 2, not {quant_mode}")
        rows, units = self._host(x), torch.zeros(tokens)
        if quant_mode:
            units = rows.float().abs().amax(-1).clamp(min=1e-12) / 127
            rows = (rows.float() / units.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
        rows = self.exchanged(_DISPATCH, ranks, rows.contiguous()).flatten(0, 1)
        units = self.exchanged(_DISPATCH, ranks, units).flatten()
        ids = self._gathered(_DISPATCH, ranks, expert_ids).flatten().long()
        require(
            bool(((ids >= 0) & (ids < moe_expert_num)).all()),
            _DISPATCH,
            f"expert_ids must be 0 to {moe_expert_num - 1}, they are {int(ids.min())} to "
            f"{int(ids.max())}",
        )
        mine = (ids // local == ep_rank_id).nonzero().flatten()
        mine = mine[ids[mine].argsort(stable=True)]  # by expert, then by rank, then by token
        anything = _ANYTHING if rows.is_floating_point() else 77
        taken = torch.full((room, x.shape[1]), anything, dtype=rows.dtype)
        taken[: len(mine)] = rows[mine // per_token]
        of_row = torch.full((room,), _ANYTHING)
        of_row[: len(mine)] = units[mine // per_token]
        info = torch.full((max(tokens * per_token, room * _INFO),), -1, dtype=torch.int32)
        info[: len(mine) * _INFO : _INFO] = mine.int()
        from_rank = mine // (tokens * per_token)
        pairs = (ids[mine] % local) * ep_world_size + from_rank
        counts = torch.bincount(pairs, minlength=local * ep_world_size)
        received = counts.cumsum(0).int()
        scales = torch.zeros(0)
        if expert_scales is not None:
            more = 2 * tokens * ep_world_size * per_token * (ep_world_size // 8)
            received = torch.cat([received, received.new_zeros(more)])
            scales = torch.zeros(room)
            scales[: len(mine)] = self._gathered(_DISPATCH, ranks, expert_scales).flatten()[mine]
        of_expert = counts.view(local, -1).sum(1)
        nothing = torch.zeros(0, dtype=torch.int32)
        found = (taken, of_row, info, of_expert, received, nothing, scales)
        return tuple(self._device(part, x.device.index) for part in found)

    def npu_moe_distribute_combine_v2(
        self,
        expand_x: Tensor,
        expert_ids: Tensor,
        assist_info_for_combine: Tensor,
        ep_send_counts: Tensor,
        expert_scales: Tensor,
        group_ep: str,
        ep_world_size: int,
        ep_rank_id: int,
        moe_expert_num: int,
        *,
        expand_scales: Tensor | None = None,
        **given: object,
    ) -> Tensor:
        ranks = Ranks(group_ep, ep_rank_id, ep_world_size)
        self._given(_COMBINE, given, expand_scales)
        sent = (assist_info_for_combine, ep_send_counts, expert_scales)
        where = (ranks, moe_expert_num, self._limits)
        product_contracts.distribute_combine(expand_x, expert_ids, *sent, *where)
        tokens, per_token = expert_ids.shape
        rows = self._gathered(_COMBINE, ranks, expand_x).flatten(0, 1)
        info = self._host(assist_info_for_combine)[::_INFO][: len(expand_x)].contiguous()
        pairs = self.exchanged(_COMBINE, ranks, info).flatten()
        local = moe_expert_num // ep_world_size
        reported = int(self._host(ep_send_counts)[local * ep_world_size - 1])
        require(
            reported == int((info >= 0).sum()),
            _COMBINE,
            f"ep_send_counts tell of {reported} rows, assist_info_for_combine of "
            f"{int((info >= 0).sum())}",
        )
        first = ep_rank_id * tokens * per_token
        out = torch.full((tokens * per_token, expand_x.shape[1]), _ANYTHING)
        is_mine = (pairs >= first) & (pairs < first + len(out))
        out[(pairs[is_mine] - first).long()] = rows[is_mine].float()
        weights = self._host(expert_scales)
        out = (out.unflatten(0, (tokens, per_token)) * weights.unsqueeze(-1)).sum(1)
        return self._device(out.to(expand_x.dtype), expand_x.device.index)

    def _given(self, name: str, given: dict[str, object], scales: Tensor | None) -> None:
        odd = {key: value for key, value in given.items() if value not in (None, 0, "")}
        odd = {key: value for key, value in odd.items() if value != _USUAL.get(key)}
        require(not odd, name, f"{odd} is not served here")
        takes = self._limits.takes_weights
        require(
            (scales is not None) == takes,
            name,
            f"this chip {'wants' if takes else 'does not take'} the weights of experts on the way",
        )

    def _fits(self, ranks: Ranks, tokens: int, width: int, per_token: int, experts: int) -> None:
        size = (tokens, width, per_token, ranks.size, experts)
        needed = -(-self._limits.buffer_bytes(*size) // MIB)
        there = self.buffer_mb(_DISPATCH, ranks)
        require(
            needed <= there,
            _DISPATCH,
            f"{tokens} tokens a rank need {needed} MB of the group's buffer, it has {there}",
        )

    def buffer_mb(self, name: str, ranks: Ranks) -> int:
        return self._exchanges.named(name, ranks.name).buffer_mb

    def _gathered(self, name: str, ranks: Ranks, x: Tensor) -> Tensor:
        return self.exchanged(name, ranks, self._host(x).contiguous())

    def exchanged(self, name: str, ranks: Ranks, x: Tensor) -> Tensor:
        """What all ranks have, [ranks, …]."""
        group = self._exchanges.named(name, ranks.name)
        require(
            (group.rank(), group.size()) == (ranks.rank, ranks.size),
            name,
            f"rank {ranks.rank} of {ranks.size}: the group has this one as {group.rank()} of "
            f"{group.size()}",
        )
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        group.under.allgather([parts], [x]).wait()
        return torch.stack(parts)
