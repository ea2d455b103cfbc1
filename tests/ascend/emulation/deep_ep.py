"""The library of Ascend's operators for whole blocks of experts (deep_ep of sgl-kernel-npu),
emulated: the calls of its `Buffer`, as its documents have them."""

from typing import Any

import torch
from torch import Tensor


class Buffer:
    """
    Args:
        group: has rank, size, and by its backend a name that HCCL knows.
    """

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        meta_addr: int = 0,
    ) -> None:
        backend = group._get_backend(torch.device("npu"))
        self._ranks = (backend.get_hccl_comm_name(group.rank()), group.size(), group.rank())
        self._is_quick = low_latency_mode

    def fused_deep_moe(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Tensor,
        gmm1_permuted_weight_scale: Tensor,
        gmm2_weight: Tensor,
        gmm2_weight_scale: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: int = 1,
    ) -> tuple[Tensor, Tensor]:
        assert self._is_quick, "low_latency_mode is not set"
        return torch.ops.deep_ep.fused_deep_moe(
            *(x, topk_idx, topk_weights),
            *(gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale),
            *self._ranks,
            *(num_max_dispatch_tokens_per_rank, num_experts, quant_mode, fuse_mode),
        )
