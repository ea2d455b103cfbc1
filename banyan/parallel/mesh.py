"""Mesh: this rank's place among the ranks of a replica, and what they do together.

A mesh of one rank needs no library and costs nothing.
"""

import torch
from torch import Tensor

from banyan.parallel.collectives import COLLECTIVES, Collectives


class Mesh:
    """One tensor-parallel group.

    Args:
        rank: 0 … size − 1.
        collectives: None only for a mesh of one.
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


def open_mesh(
    rank: int, size: int, address: str, library: str = "gloo", timeout_s: float = 300.0
) -> Mesh:
    """Meet the other ranks at `address`; returns when all have come.

    Args:
        address: tcp://host:port or file:///path, the same on every rank; "" for one rank.
        library: name of the collective library (`Traits.collectives`).
    """
    if size == 1:
        return Mesh()
    return Mesh(rank, size, COLLECTIVES.load(library)(rank, size, address, timeout_s))
