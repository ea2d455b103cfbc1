"""What the collectives of NPUs accept, as `contracts.py` says it for operators."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import HALVES, placed, typed

TYPES = (*HALVES, torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64)
"""Number types that all collectives of A2 and A3 take."""


def exchanged(name: str, *tensors: Tensor) -> None:
    """tensors: what a collective is given and what it fills."""
    name = f"hccl {name}"
    named = {f"tensor {at}": x for at, x in enumerate(tensors)}
    placed(name, **named)
    typed(name, TYPES, **named)
