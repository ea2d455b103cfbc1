"""What deep_ep's operators of whole blocks of experts accept, as `contracts.py` says it for others
(documents of sgl-kernel-npu: FUSED_DEEP_MOE)."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import placed, require, shape_of, typed
from banyan.ops.experts_api import Ranks
from banyan.platform.base import Fusing
from banyan.platform.dispatch import fusing_obstacle

NAME = "fused_deep_moe"
MODES = (1, 2)


def fused_deep_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    ranks: Ranks,
    experts: int,
    mode: int,
    limits: Fusing,
) -> None:
    """x: [tokens, dim]; ids, weights: [tokens, per_token]; gate_up: [experts here, dim, inner · 2];
    down: [experts here, dim, inner] by the first operator, [experts here, inner, dim] by the second
    one; scales: [experts here, outputs]; experts: of all ranks."""
    placed(NAME, x=x, topk_idx=ids, topk_weights=weights)
    placed(NAME, gmm1_permuted_weight=gate_up, gmm1_permuted_weight_scale=gate_up_scale)
    placed(NAME, gmm2_weight=down, gmm2_weight_scale=down_scale)
    require(mode in MODES, NAME, f"fuse_mode is 1 or 2, not {mode}")
    typed(NAME, (torch.bfloat16,), x=x)
    typed(NAME, (torch.int64,), topk_idx=ids)
    typed(NAME, (torch.float32,), topk_weights=weights)
    typed(NAME, (torch.int8,), gmm1_permuted_weight=gate_up, gmm2_weight=down)
    scale = torch.float32 if mode == 1 else torch.int64
    typed(NAME, (scale,), gmm1_permuted_weight_scale=gate_up_scale, gmm2_weight_scale=down_scale)
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids) and weights.shape == ids.shape,
        NAME,
        "x must be [tokens, dim], topk_idx and topk_weights [tokens, experts of a token], they are "
        f"{shape_of(x)}, {shape_of(ids)} and {shape_of(weights)}",
    )
    require(
        gate_up.dim() == 3 and gate_up.shape[1] == x.shape[1],
        NAME,
        f"gmm1_permuted_weight must be [experts, {x.shape[1]}, gates and ups], it is "
        f"{shape_of(gate_up)}",
    )
    count, dim, both = gate_up.shape
    size = (len(x), dim, both, ids.shape[1], ranks.size, experts)
    why = fusing_obstacle(limits, *size)
    require(not why, NAME, why)
    local = experts // ranks.size
    require(count == local, NAME, f"{count} experts are here, {experts} of all make {local}")
    wanted = (count, dim, both // 2) if mode == 1 else (count, both // 2, dim)
    require(
        tuple(down.shape) == wanted,
        NAME,
        f"gmm2_weight must be {list(wanted)}, it is {shape_of(down)}",
    )
    for name, part, outputs in (
        ("gmm1_permuted_weight_scale", gate_up_scale, both),
        ("gmm2_weight_scale", down_scale, dim),
    ):
        require(
            tuple(part.shape) == (count, outputs),
            NAME,
            f"{name} must be [{count}, {outputs}], it is {shape_of(part)}",
        )
    is_there = 0 <= ranks.rank < ranks.size and bool(ranks.name)
    require(is_there, NAME, f"rank {ranks.rank} of {ranks.size} in group {ranks.name!r} is nobody")
