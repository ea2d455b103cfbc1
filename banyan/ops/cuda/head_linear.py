"""Per-head matrices with the vendor's library; weights have the activations' type."""

import torch
from torch import Tensor

from banyan.ops.api import PackedHeadLinear
from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import TYPES
from banyan.ops.stored import StoredWeight


class BatchedHeadLinear:
    """Weights [heads, in, out] in the activations' type; sums are fp32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], *self.weight.shape[::2])
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))
        return out


def _pack(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, may_round: bool
) -> PackedHeadLinear:
    return BatchedHeadLinear(weight.dense.to(device, dtype))


head_linear = Kernel(
    supports=lambda spec: None if spec.dtype in TYPES else f"activations are {spec.dtype}",
    run=_pack,
)
