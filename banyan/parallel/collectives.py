"""Collective operations of a group of ranks, and the choice of their library.

The rendezvous address is explicit: tcp://host:port (rank 0 listens), or file:///path if all ranks
are on this machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.table import Table
from banyan.ops.api import Recorder

log = logger(__name__)


class Collectives(Protocol):
    """Collective operations.

    Every rank calls the same methods in the same order, with the same number of rows. Sums are
    computed in fp32 in rank order, so every rank gets the same bits for any number of rows. If the
    ops have a recorder, a collective is recorded or raises NotRecordable.

    x: [n, width] with contiguous rows; any shape for all_reduce, broadcast, send and recv.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Replace x on every rank by the sum over the ranks."""
        ...

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """The x of all ranks, side by side: [n, columns].

        Each rank has ⌈columns / ranks⌉ columns; the last ranks may have fewer.
        """
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's columns of the sum over the ranks, [n, width / ranks]."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Column block r of x goes to rank r; column block r of the result comes from rank r."""
        ...

    def gather_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """The rows of all ranks, in rank order: [count, width].

        In this method and the next ones every rank has rows of its own.

        x: begins with this rank's rows.
        rows: `dp_attention.batch.DPAttentionRows.table`: the number of rows of each rank.
        count: rows of all ranks.
        """
        ...

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """This rank's `count` rows (see `rows`) of the sum of x over the ranks."""
        ...

    def gather_columns(self, x: Tensor, columns: int, rows: Tensor, count: int) -> Tensor:
        """This rank's `count` rows (see `rows`) of the result of `all_gather`."""
        ...

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int, rows: Tensor) -> Tensor:
        """Like `gather_rows`, but each row goes only to the ranks that hold one of its experts.

        places: [count, per_token] int64, for the rows of all ranks: the place of each expert of a
        row. Places are numbered over all ranks; each rank has `of_rank` of them.
        returns: [count, width]; rows that were not received are undefined.
        """
        ...

    def combine_rows(
        self,
        x: Tensor,
        places: Tensor,
        of_rank: int,
        rows: Tensor | None,
        count: int,
        is_apart: bool,
    ) -> Tensor:
        """Undo `dispatch_rows`: return expert outputs to the ranks that own the rows.

        x: [n, width]; only rows with an expert on this rank are used. If `is_apart`
        [n, per_token · width]; only the pairs of a row and an expert on this rank are used.
        rows: None if all ranks have the same rows.
        returns: this rank's rows: [count, width], summed over the ranks of their experts; if
        `is_apart` [count, per_token · width].
        """
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace x on every rank by the x of rank `source`."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send x to rank `to`, which calls `recv`. No other rank takes part."""
        ...

    def recv(self, x: Tensor, source: int) -> None:
        """Replace x by the tensor that rank `source` sends next."""
        ...


class NamedCollectives(Collectives, Protocol):
    """Collectives of a device whose own operators can exchange rows."""

    def name(self) -> str:
        """Name of the group in these operators."""
        ...


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of one group find each other.

    Attributes:
        timeout_s: longest wait for another rank; then an error is raised.
        recorder: recorder of the ops; None without one.
        name: name of the group; several groups of a replica use one address.
        is_crowded: this machine's ranks have more threads than cores.
        interface: network interface that a rank listens on; "" = the one that reaches the others.
        is_exchange: only operators of the device use the group.
        slot_bytes: bytes that a rank can offer to the others at once; 0 = the library's default.
        uses_own_sums: sums over ranks are the library's own, in its order of additions.
        checks_peers: known sums show whether devices really reach each other's memory.
    """

    rank: int
    size: int
    address: str
    timeout_s: float
    recorder: Recorder | None = None
    is_crowded: bool = False
    name: str = ""
    slot_bytes: int = 0
    is_exchange: bool = False
    interface: str = ""
    uses_own_sums: bool = False
    checks_peers: bool = False

    @property
    def path(self) -> str:
        """The rendezvous file; "" if the ranks may be on several machines.

        Raises:
            ConfigError: the address is neither tcp://host:port nor file:///path.
        """
        parts = urlsplit(self.address)
        if parts.scheme == "file" and parts.path:
            return parts.path + self.name
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return ""
        raise ConfigError(
            f"ranks cannot meet at {self.address!r}", hint="use tcp://host:port or file:///path"
        )


@dataclass(frozen=True)
class Transport:
    """A library of collectives.

    Attributes:
        declines: reason why it cannot be used, the same on every rank; None if it can.
        open: connects to the other ranks; returns when all of them have come.
    """

    declines: Callable[[Rendezvous], str | None]
    open: Callable[[Rendezvous], Collectives]


COLLECTIVES: Table[Transport] = Table(
    "collective library",
    {
        "shared": "banyan.parallel.shared:SHARED",
        "gloo": "banyan.parallel.process_group:GLOO",
        "peer memory": "banyan.parallel.nccl:PEER_MEMORY",
        "nccl": "banyan.parallel.nccl:NCCL",
        "hccl": "banyan.ascend.hccl:HCCL",
    },
    "banyan.collectives",
)


def open_collectives(rendezvous: Rendezvous, names: Sequence[str]) -> Collectives:
    """Connect to the other ranks over the first of these libraries that can be used.

    Raises:
        ConfigError: none of them can be used.
    """
    declined: list[str] = []
    for name in names:
        transport = COLLECTIVES.load(name)
        reason = transport.declines(rendezvous)
        if reason is not None:
            declined.append(f"{name}: {reason}")
            continue
        if rendezvous.rank == 0 and not rendezvous.name:
            why = f" ({'; '.join(declined)})" if declined else ""
            log.info("%d ranks work together by %s%s", rendezvous.size, name, why)
        return transport.open(rendezvous)
    raise ConfigError(f"no collectives for {rendezvous.size} ranks: {'; '.join(declined)}")
