"""Collectives between the ranks of a mesh, one small class per library, without process globals.

The rendezvous is given explicitly: tcp://host:port (rank 0 listens) or file:///path.
"""

from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

from torch import Tensor
from torch import distributed as dist

from banyan.base.errors import ConfigError
from banyan.base.table import Table


class Collectives(Protocol):
    """What ranks do together. Every rank calls the same methods in the same order."""

    def sum(self, x: Tensor) -> None:
        """Replace x on every rank by the sum over the ranks."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, in rank order; shapes and dtypes are equal."""
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace x on every rank by that of rank `source`."""
        ...


COLLECTIVES: Table[type] = Table(
    "collective library", {"gloo": "banyan.parallel.collectives:Gloo"}, "banyan.collectives"
)


class Gloo:
    """Collectives of host memory.

    Args:
        timeout_s: a collective that waits longer for another rank raises.
    """

    def __init__(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = _open_store(rank, size, address, timeout)
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._size = size

    def sum(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [x.new_empty(x.shape) for _ in range(self._size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def broadcast(self, x: Tensor, source: int) -> None:
        self._group.broadcast(x, source).wait()


def _open_store(rank: int, size: int, address: str, timeout: timedelta) -> dist.Store:
    parts = urlsplit(address)
    if parts.scheme == "file" and parts.path:
        store = dist.FileStore(parts.path, size)
        store.set_timeout(timeout)
        return store
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return dist.TCPStore(parts.hostname, parts.port, size, rank == 0, timeout)
    raise ConfigError(
        f"ranks cannot meet at {address!r}", hint="use tcp://host:port or file:///path"
    )
