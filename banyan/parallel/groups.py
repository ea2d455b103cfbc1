"""Groups of ranks by purpose: who shares the heads, the inner width, the experts, the vocabulary.

A layer is handed the one group that its weights are cut over and knows no other, so a layout of
ranks is a choice made here and nowhere else. A group of one needs no library and costs nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.parallel.collectives import COLLECTIVES, Collectives


class Group:
    """Ranks that share something, and what they do together.

    Args:
        rank: this rank's place in the group, 0 … size − 1.
        collectives: None only for a group of one.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, collectives: Collectives | None = None
    ) -> None:
        assert 0 <= rank < size and (size == 1 or collectives is not None)
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; x itself is used for it and must not be needed any more."""
        if self._collectives is not None:
            self._collectives.sum(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The x of all ranks side by side along the last dimension."""
        if self._collectives is None:
            return x
        return torch.cat(self._collectives.gather(x.contiguous()), dim=-1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source`, written into x on every rank."""
        if self._collectives is not None:
            self._collectives.broadcast(x, source)
        return x


@dataclass(frozen=True)
class Groups:
    """One rank's groups.

    Attributes:
        world: all ranks of the replica, which run the same plans.
        attention: share the heads.
        ffn: share the inner width of feed-forward blocks.
        experts: share the routed experts, each of which is whole on …
        expert_ffn: … the ranks that share its inner width.
        vocabulary: share the token ids of embedding and logits.
    """

    world: Group
    attention: Group
    ffn: Group
    experts: Group
    expert_ffn: Group
    vocabulary: Group

    @classmethod
    def of(cls, group: Group) -> "Groups":
        """Tensor parallelism: the same ranks share everything, experts within each of them."""
        return cls(group, group, group, Group(), group, group)

    @classmethod
    def with_experts_apart(cls, group: Group) -> "Groups":
        """As `of`, but each rank holds some of the experts whole."""
        return cls(group, group, group, group, Group(), group)


ALONE = Groups.of(Group())
"""One rank that holds all."""


def open_groups(
    rank: int, size: int, address: str, library: str = "gloo", timeout_s: float = 300.0
) -> Groups:
    """Meet the other ranks at `address`; returns when all have come.

    Args:
        address: tcp://host:port or file:///path, the same on every rank; "" for one rank.
        library: name of the collective library (`Traits.collectives`).
    """
    if size == 1:
        return ALONE
    return Groups.of(Group(rank, size, COLLECTIVES.load(library)(rank, size, address, timeout_s)))
