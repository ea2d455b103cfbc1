"""RMSNorm, alone or fused with the residual stream."""

import torch
from torch import Tensor

from banyan.layers.slot import Layer, WeightSlot, single
from banyan.ops.api import Ops
from banyan.ops.stored import StoredWeight


class RMSNorm(Layer):
    def __init__(
        self, dim: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.ops = ops
        self.weight = torch.empty(0, dtype=dtype, device=device)  # [dim] once filled

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single((self.dim,))}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.weight = parts[0].dense.to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x joins the residual stream, or begins it: (normed, new residual)."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
