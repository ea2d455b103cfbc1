"""Rows of nobody, where all ranks have to bring as many."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def filled(x: Tensor, ids: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Up to `tokens`; what is filled up goes through the first experts, with no weight."""
    room, per_token = tokens - len(x), ids.shape[1]
    if not room:
        return x, ids, weights
    others = torch.arange(per_token, device=ids.device).expand(room, -1)
    return pad(x, (0, 0, 0, room)), torch.cat([ids, others]), pad(weights, (0, 0, 0, room))
