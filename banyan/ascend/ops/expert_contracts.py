"""What the NPU's operators of blocks of experts accept, as `contracts.py` says it for others."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import HALVES, placed, require, shape_of, typed
from banyan.ops.experts_api import Ranks
from banyan.platform.base import Dispatch
from banyan.platform.dispatch import obstacle

_GROUPED = "npu_grouped_matmul"
_MOST_PER_TOKEN, _MOST_GROUPS, _WIDEST = 512, 1024, 65536


def init_routing(x: Tensor, ids: Tensor, experts: int, first: int, last: int) -> None:
    """x: [tokens, dim]; ids: [tokens, per_token]."""
    name = "npu_moe_init_routing_v2"
    placed(name, x=x, expert_idx=ids)
    typed(name, (*HALVES, torch.float32), x=x)
    typed(name, (torch.int32,), expert_idx=ids)
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids),
        name,
        f"x must be [tokens, dim] and expert_idx [tokens, experts of a token], they are "
        f"{shape_of(x)} and {shape_of(ids)}",
    )
    require(
        0 < ids.shape[1] <= min(_MOST_PER_TOKEN, experts),
        name,
        f"a token goes through 1 to {min(_MOST_PER_TOKEN, experts)} of {experts} experts, "
        f"not {ids.shape[1]}",
    )
    require(
        0 <= first < last <= experts,
        name,
        f"active_expert_range must be a part of the {experts} experts, it is {first} to {last}",
    )


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    """x: [rows, in]; weight: [groups, in, out]; counts: [groups], rows of each."""
    placed(_GROUPED, x=x, weight=weight, group_list=counts)
    typed(_GROUPED, (*HALVES, torch.float32), x=x, weight=weight)
    _grouped(x, weight, counts)


def grouped_quant_matmul(
    x: Tensor, weight: Tensor, counts: Tensor, scale: Tensor, units: Tensor, dtype: torch.dtype
) -> None:
    """The same of int8 numbers; scale: [groups, out]; units: [rows]; dtype: of what is made."""
    placed(_GROUPED, x=x, weight=weight, group_list=counts, scale=scale, per_token_scale=units)
    typed(_GROUPED, (torch.int8,), x=x, weight=weight)
    require(dtype in HALVES, _GROUPED, f"output_dtype must be one of {HALVES}, it is {dtype}")
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    typed(_GROUPED, (kind,), scale=scale)
    typed(_GROUPED, (torch.float32,), per_token_scale=units)
    _grouped(x, weight, counts)
    wanted = (len(weight), weight.shape[2])
    require(
        tuple(scale.shape) == wanted,
        _GROUPED,
        f"scale must be {list(wanted)}, it is {shape_of(scale)}",
    )
    require(
        tuple(units.shape) == (len(x),),
        _GROUPED,
        f"per_token_scale must be [{len(x)}], it is {shape_of(units)}",
    )


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    name = _GROUPED
    typed(name, (torch.int64,), group_list=counts)
    require(
        x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1],
        name,
        f"x must be [rows, in] and weight [groups, in, out], they are {shape_of(x)} and "
        f"{shape_of(weight)}",
    )
    widest = max(x.shape[1], weight.shape[2])
    require(widest < _WIDEST, name, f"widths must be less than {_WIDEST}, one is {widest}")
    groups = len(weight)
    require(
        tuple(counts.shape) == (groups,) and 1 < groups <= _MOST_GROUPS,
        name,
        f"group_list must have a number for each of {groups} groups, 2 to {_MOST_GROUPS}; it is "
        f"{shape_of(counts)}",
    )


def token_unpermute(rows: Tensor, places: Tensor, weights: Tensor) -> None:
    """rows: [tokens · per_token, dim]; places: the row of each pair of a token and an expert;
    weights: [tokens, per_token]."""
    name = "npu_moe_token_unpermute"
    placed(name, permuted_tokens=rows, sorted_indices=places, probs=weights)
    typed(name, HALVES, permuted_tokens=rows, probs=weights)
    typed(name, (torch.int32,), sorted_indices=places)
    require(
        weights.dim() == 2 and places.shape == (weights.numel(),) and len(rows) == len(places),
        name,
        "permuted_tokens, sorted_indices and probs must be of the same pairs of a token and an "
        f"expert, they are {shape_of(rows)}, {shape_of(places)} and {shape_of(weights)}",
    )
    most = _MOST_PER_TOKEN
    require(
        weights.shape[1] <= most, name, f"at most {most} experts a token, not {weights.shape[1]}"
    )


def distribute_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, experts: int, limits: Dispatch
) -> None:
    """x: [tokens, dim]; ids, weights: [tokens, per_token]; experts: of all ranks."""
    name = "npu_moe_distribute_dispatch_v2"
    placed(name, x=x, expert_ids=ids, expert_scales=weights)
    typed(name, HALVES, x=x)
    typed(name, (torch.float32,), expert_scales=weights)
    require(
        weights.shape == ids.shape,
        name,
        f"expert_scales must be {shape_of(ids)}, they are {shape_of(weights)}",
    )
    typed(name, (torch.int32,), expert_ids=ids)
    _exchanged(name, x, ids, ranks, experts, limits)


def distribute_combine(
    rows: Tensor,
    ids: Tensor,
    places: Tensor,
    received: Tensor,
    weights: Tensor,
    ranks: Ranks,
    experts: int,
    limits: Dispatch,
) -> None:
    """rows, places, received: as the exchange gave them; weights: as ids."""
    name = "npu_moe_distribute_combine_v2"
    placed(name, expand_x=rows, expert_ids=ids, assist_info_for_combine=places)
    placed(name, ep_send_counts=received, expert_scales=weights)
    typed(name, HALVES, expand_x=rows)
    typed(name, (torch.int32,), expert_ids=ids, assist_info_for_combine=places)
    typed(name, (torch.int32,), ep_send_counts=received)
    typed(name, (torch.float32,), expert_scales=weights)
    _exchanged(name, rows[: len(ids)], ids, ranks, experts, limits)
    local = experts // ranks.size
    room = len(ids) * ranks.size * min(local, ids.shape[1])
    require(
        len(rows) == room,
        name,
        f"expand_x must be the {room} rows of the exchange, it is {shape_of(rows)}",
    )
    require(
        weights.shape == ids.shape,
        name,
        f"expert_scales must be {shape_of(ids)}, they are {shape_of(weights)}",
    )
    require(
        len(received) >= ranks.size * local and places.dim() == 1,
        name,
        "ep_send_counts and assist_info_for_combine must be those of the exchange, they are "
        f"{shape_of(received)} and {shape_of(places)}",
    )


def _exchanged(
    name: str, x: Tensor, ids: Tensor, ranks: Ranks, experts: int, limits: Dispatch
) -> None:
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids),
        name,
        f"rows must be [tokens, dim] and expert_ids [tokens, experts of a token], they are "
        f"{shape_of(x)} and {shape_of(ids)}",
    )
    why = obstacle(limits, len(x), x.shape[1], ids.shape[1], ranks.size, experts)
    require(not why, name, why)
    is_there = 0 <= ranks.rank < ranks.size and bool(ranks.name)
    require(is_there, name, f"rank {ranks.rank} of {ranks.size} in group {ranks.name!r} is nobody")
