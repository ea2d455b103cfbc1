"""What an exchange of a fixed size gives back, held against the experts in fp32."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ascend.platform import NpuPlatform
from banyan.ops.experts_api import ExchangingExperts, Ranks

Given = tuple[Tensor, Tensor, Tensor]
"""Rows, and the ids and weights of their experts."""


@dataclass(frozen=True)
class Tokens:
    """Random ones, by rank and seed."""

    dim: int
    experts: int
    per_token: int
    dtype: torch.dtype

    def __call__(self, rank: int, count: int, seed: int) -> Given:
        draw = torch.Generator().manual_seed(10 * seed + rank)
        x = torch.randn(count, self.dim, generator=draw).to(self.dtype)
        ids = torch.rand(count, self.experts, generator=draw).argsort(-1)[:, : self.per_token]
        return x, ids, torch.rand(count, self.per_token, generator=draw)


def how_far(
    platform: NpuPlatform,
    packed: ExchangingExperts,
    dense: Callable[..., Tensor],
    ranks: Ranks,
    tokens: Tokens,
) -> list[float]:
    """Of each of three steps, of as many rows on each rank and not, and two that are replayed: the
    farthest that a number of this rank's rows is from what it should be."""
    rank, found = ranks.rank, list[float]()
    device = torch.device("npu", rank)
    for seed, (mine, share) in enumerate([(4, 4), (3 - 2 * rank, 3), (7 * rank, 7)]):
        given = tokens(rank, mine, seed)
        out = packed.exchanged(*(part.to(device) for part in given), ranks, share)
        assert len(out) == share
        wanted = dense(given[0].float(), *given[1:])
        found.append(float((out[:mine].cpu().float() - wanted).abs().max()) if mine else 0.0)
    held = [torch.empty_like(part).to(device) for part in tokens(rank, 4, 0)]
    kept = torch.zeros(4, tokens.dim, dtype=tokens.dtype, device=device)
    for part, values in zip(held, tokens(rank, 4, 5), strict=True):
        part.copy_(values)
    graph = platform.capture(lambda: kept.copy_(packed.exchanged(*held, ranks, 4)))
    for seed in (6, 7):
        given = tokens(rank, 4, seed)
        for part, values in zip(held, given, strict=True):
            part.copy_(values)
        graph.replay()
        wanted = dense(given[0].float(), *given[1:])
        found.append(float((kept.cpu().float() - wanted).abs().max()))
    return found
