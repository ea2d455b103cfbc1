"""Collectives of NVIDIA GPUs: NCCL, and for small sums memory that the GPUs of one machine share.

NCCL only moves numbers here. They are added in rank order by kernels of this project, so a sum has
the same bits for any size and on any rank, whichever way it takes. Nothing waits for the host, so
all of it can be captured in graphs.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.ops.cuda.all_reduce import (
    PeerAllReduce,
    Publish,
    add_in_order,
    has_no_peers,
    open_peers,
    own_device,
    own_kind,
)
from banyan.ops.cuda.needs import has_triton
from banyan.parallel.collectives import Rendezvous, Transport
from banyan.parallel.process_group import GroupCollectives, dist, in_order, mine_of, open_store

log = logger(__name__)

_HAS_TRITON = has_triton()
_ONE_TRIP_BYTES = 1 << 16
"""Up to this size every rank gets all addends at once; larger sums take two trips with less in
each."""


class NcclCollectives(GroupCollectives):
    """Implements `Collectives`.

    Args:
        peers: adds small tensors; None = NCCL moves all of them.
    """

    def __init__(
        self, group: Any, rendezvous: Rendezvous, peers: PeerAllReduce | None = None
    ) -> None:
        super().__init__(group, rendezvous)
        self._peers = peers

    def all_reduce(self, x: Tensor) -> None:
        if not x.numel():
            return
        if self._peers is not None and self._peers.takes(x):
            self._peers.add(x)
        elif self._size == 2 or x.nbytes <= _ONE_TRIP_BYTES:
            x.copy_(_added(self._gathered(x)))
        else:
            x.copy_(self._in_two_trips(x))

    def _in_two_trips(self, x: Tensor) -> Tensor:
        """The sum: each rank gets its part of every addend, and sends the part's sum to all."""
        count, part = x.numel(), -(-x.numel() // self._size)
        given = torch.nn.functional.pad(x.reshape(-1), (0, part * self._size - count))
        sums = self._gathered(_added(self._exchanged(given.view(self._size, part))))
        return sums.view(-1)[:count].view(x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        given = torch.stack(x.chunk(self._size, 1))  # [ranks, n, width / ranks]
        return _added(self._exchanged(given)) if given.numel() else given[0]

    def all_to_all(self, x: Tensor) -> Tensor:
        given = torch.stack(x.chunk(self._size, 1))
        came = self._exchanged(given) if given.numel() else given
        return torch.cat(tuple(came), dim=1)

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        self.all_reduce(x)
        return x[mine_of(rows)]

    def send(self, x: Tensor, to: int) -> None:
        self.group._start_coalescing()  # so that it uses the group's own connections
        self.group.send([x], to, 0)
        self.group._end_coalescing().wait()

    def recv(self, x: Tensor, source: int) -> None:
        self.group._start_coalescing()
        self.group.recv([x], source, 0)
        self.group._end_coalescing().wait()

    def _parts(self, x: Tensor) -> list[Tensor]:
        return list(self._gathered(x)) if x.numel() else [x] * self._size

    def _gathered(self, x: Tensor) -> Tensor:
        """The x of every rank, [ranks, *shape of x]."""
        out = x.new_empty((self._size, *x.shape))
        self.group._allgather_base(out, x.contiguous()).wait()
        return out

    def _exchanged(self, given: Tensor) -> Tensor:
        """given[r] goes to rank r; the result's [r] comes from rank r."""
        came = torch.empty_like(given)
        self.group.alltoall_base(came, given, [], [], dist.AllToAllOptions()).wait()
        return came


def _added(parts: Tensor) -> Tensor:
    return add_in_order(parts) if _HAS_TRITON and parts.is_cuda else in_order(list(parts))


def _publisher(rendezvous: Rendezvous, store: Any) -> Publish:
    def publish(name: str, mine: bytes) -> list[bytes]:
        store.set(f"{name}.{rendezvous.rank}", mine)
        return [store.get(f"{name}.{rank}") for rank in range(rendezvous.size)]

    return publish


def check_kinds(publish: Publish) -> None:
    """Every rank computes the logits' last steps, and all must find the same tokens.

    Raises:
        ConfigError: the ranks have GPUs of several kinds.
    """
    kinds = sorted({kind.decode() for kind in publish("kinds", own_kind().encode())})
    if len(kinds) > 1:
        raise ConfigError(
            f"the ranks of a replica have GPUs of several kinds: {', '.join(kinds)}",
            hint="choose GPUs of one kind with CUDA_VISIBLE_DEVICES, or with --base-gpu-id and "
            "--gpu-id-step",
        )


def open_process_group(rendezvous: Rendezvous, store: Any) -> Any:
    """NCCL's process group of this rank, with all its connections made: none is made while a graph
    is captured, or after the memory was divided."""
    check_kinds(_publisher(rendezvous, store))
    nccl: Any = dist.distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    group = nccl(store, rendezvous.rank, rendezvous.size, options)
    x = torch.zeros(rendezvous.size, device=own_device())
    group.alltoall_base(torch.empty_like(x), x, [], [], dist.AllToAllOptions()).wait()
    group._allgather_base(x.new_empty(len(x) ** 2), x).wait()
    group.broadcast(x, 0).wait()
    x.tolist()  # sync: once
    return group


def _open(rendezvous: Rendezvous) -> NcclCollectives:
    return NcclCollectives(open_process_group(rendezvous, open_store(rendezvous)), rendezvous)


def _open_with_peers(rendezvous: Rendezvous) -> NcclCollectives:
    store = open_store(rendezvous)
    group = open_process_group(rendezvous, store)
    publish = _publisher(rendezvous, store)
    peers = open_peers(publish, rendezvous.rank, rendezvous.checks_peers)
    if isinstance(peers, str):
        if rendezvous.rank == 0:
            name = rendezvous.name or "all ranks"
            log.info("NCCL moves small tensors of %s too: %s", name, peers)
        peers = None
    return NcclCollectives(group, rendezvous, peers)


NCCL = Transport(declines=lambda rendezvous: None, open=_open)
PEER_MEMORY = Transport(
    declines=lambda rendezvous: has_no_peers(rendezvous.size), open=_open_with_peers
)
