"""Collectives over a torch process group of any library. GLOO works between machines, and without
the compiled library.
"""

import fcntl
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.ops.api import NotRecordable
from banyan.parallel.collectives import Rendezvous, Transport

Check = Callable[[str, Tensor], None]
"""Checks the input of a collective, given its name, against the limits of its library."""

_SIOCGIFADDR, _MAX_INTERFACE = 0x8915, 15
"""Linux: the request for an interface's IPv4 address, and the longest name (netdevice(7))."""
_LOOPBACK = "127.0.0.1"
"""Ranks whose rendezvous is a file are on one machine and listen here only."""

dist = cast(Any, torch.distributed)  # process groups and stores have no type stubs


def open_store(rendezvous: Rendezvous) -> Any:
    """Open the key-value store through which the ranks find each other."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if rendezvous.path:
        store = dist.FileStore(rendezvous.path, rendezvous.size)
        store.set_timeout(timeout)
        return store
    parts = urlsplit(rendezvous.address)
    store = dist.TCPStore(
        str(parts.hostname),
        parts.port or 0,
        rendezvous.size,
        # The first group of a replica has no name. Its rank 0 hosts the store for all groups.
        rendezvous.rank == 0 and not rendezvous.name,
        timeout,
    )
    return dist.PrefixStore(rendezvous.name, store)


class GroupCollectives:
    """Implements `Collectives`; none of them can be recorded.

    Args:
        group: the library's process group.
        check: None if the library has no limits.
    """

    def __init__(self, group: Any, rendezvous: Rendezvous, check: Check | None = None) -> None:
        self.group = group
        self._rank, self._size = rendezvous.rank, rendezvous.size
        self._recorder = rendezvous.recorder
        self._uses_own_sums = rendezvous.uses_own_sums
        self._check = check

    def all_reduce(self, x: Tensor) -> None:
        if self._uses_own_sums:
            self._look("all_reduce", x)
            self.group.allreduce([x]).wait()
            return
        # The order of additions in the library's all-reduce depends on the size of x.
        x.copy_(in_order(self._parts(x)))

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        missing = -(-columns // self._size) - x.shape[1]
        whole = torch.nn.functional.pad(x, (0, missing))
        return torch.cat(self._parts(whole), dim=1)[:, :columns]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return in_order([part.chunk(self._size, 1)[self._rank] for part in self._parts(x)])

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.cat([part.chunk(self._size, 1)[self._rank] for part in self._parts(x)], dim=1)

    def gather_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        given = rows[2:].tolist()
        mine = given[self._rank]
        whole = torch.nn.functional.pad(x[:mine], (0, 0, 0, max(given) - mine))
        parts = self._parts(whole)
        return torch.cat([part[:n] for part, n in zip(parts, given, strict=True)])

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        return in_order([part[mine_of(rows)] for part in self._parts(x)])

    def gather_columns(self, x: Tensor, columns: int, rows: Tensor, count: int) -> Tensor:
        return self.all_gather(x, columns)[mine_of(rows)]

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int, rows: Tensor) -> Tensor:
        given = rows[2:].tolist()
        needs = _ranks_of(places, of_rank, self._size)  # [ranks, count]
        by_source = [part.split(given) for part in needs]
        sent = [x[: given[self._rank]][part[self._rank]] for part in by_source]
        coming = [int(part.sum()) for part in by_source[self._rank]]
        out = x.new_zeros(len(places), x.shape[1])
        out[needs[self._rank]] = self._carry(sent, coming)
        return out

    def combine_rows(
        self,
        x: Tensor,
        places: Tensor,
        of_rank: int,
        rows: Tensor | None,
        count: int,
        is_apart: bool,
    ) -> Tensor:
        all_rows = torch.tensor([0, len(x)]) if rows is None else rows[:2]
        owned = [mine_of(part) for part in self._parts(all_rows.view(1, 2).to(x.device))]
        if is_apart:
            pairs, ranks = x.unflatten(1, (places.shape[1], -1)), places // of_rank
            has = torch.stack([ranks == r for r in range(self._size)])
        else:
            pairs, has = x, _ranks_of(places, of_rank, self._size)
        sent = [pairs[part][has[self._rank, part]] for part in owned]
        own = has[:, owned[self._rank]]
        coming = [int(part.sum()) for part in own]
        parts = self._exchange(sent, coming).split(coming)
        out = x.new_zeros((count, *pairs.shape[1:]), dtype=torch.float32)
        for mask, part in zip(own, parts, strict=True):
            out[mask] += part.float()
        return out.to(x.dtype).flatten(1)

    def _carry(self, sent: list[Tensor], coming: list[int]) -> Tensor:
        """Exchange rows that go to experts; a subclass may quantise them."""
        return self._exchange(sent, coming)

    def _exchange(self, sent: list[Tensor], coming: list[int]) -> Tensor:
        """Send `sent[r]` to rank r and return the received rows, in order of the ranks.

        coming: number of rows from each rank.
        """
        given = torch.cat(sent)
        self._look("all_to_all", given)
        out = sent[0].new_empty((sum(coming), *sent[0].shape[1:]))
        counts = [len(part) for part in sent]
        options = dist.AllToAllOptions()
        self.group.alltoall_base(out, given, coming, counts, options).wait()
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        self._look("broadcast", x)
        self.group.broadcast(x, source).wait()

    def send(self, x: Tensor, to: int) -> None:
        self._look("send", x)
        self.group.send([x], to, 0).wait()

    def recv(self, x: Tensor, source: int) -> None:
        self._look("recv", x)
        self.group.recv([x], source, 0).wait()

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The x of every rank, in the order of the ranks."""
        x = x.contiguous()
        self._look("all_gather", x)
        if not x.numel():  # empty on every rank
            return [x] * self._size
        parts = [x.new_empty(x.shape) for _ in range(self._size)]
        self.group.allgather([parts], [x]).wait()
        return parts

    def _look(self, name: str, x: Tensor) -> None:
        """Check x before a collective.

        A recording holds compiled ops only, so it would silently lack the collective.

        Raises:
            NotRecordable: ops are being recorded.
        """
        if self._recorder is not None and self._recorder.is_recording:
            raise NotRecordable("collectives of a process group are no compiled ops")
        if self._check is not None:
            self._check(name, x)


def mine_of(rows: Tensor) -> slice:
    """This rank's rows, from a table of `DPAttentionRows` on the host."""
    first, count = rows.flatten()[:2].tolist()
    return slice(first, first + count)


def _ranks_of(places: Tensor, of_rank: int, size: int) -> Tensor:
    """Which ranks have an expert of each row: [size, rows] bool."""
    ranks = places // of_rank
    return torch.stack([(ranks == rank).any(1) for rank in range(size)])


def in_order(parts: list[Tensor]) -> Tensor:
    """The sum in fp32 in the order of the parts, rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def own_address(host: str | None, interface: str = "") -> str:
    """This machine's address of an interface, or on the route to `host`; nothing is sent.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not interface:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        asked = struct.pack("40s", interface.encode()[:_MAX_INTERFACE])
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
        except OSError:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={printable(interface, 60)}: this machine has no such "
                "interface with an IPv4 address",
                hint=f"there are: {known}",
            ) from None
        return socket.inet_ntoa(found[20:24])


def _listen_address(rendezvous: Rendezvous) -> str:
    return own_address(urlsplit(rendezvous.address).hostname, rendezvous.interface)


def _open(rendezvous: Rendezvous) -> GroupCollectives:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    host = _LOOPBACK if rendezvous.path else _listen_address(rendezvous)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    group = dist.ProcessGroupGloo(open_store(rendezvous), rendezvous.rank, rendezvous.size, options)
    return GroupCollectives(group, rendezvous)


GLOO = Transport(declines=lambda rendezvous: None, open=_open)
