"""Attention of tensors without numbers: only the shape is right."""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel


def _paged_attention(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q)


paged_attention = Kernel(run=_paged_attention, supports=lambda spec: None)
