"""What the ranks of a group do together, and the choice of the library that does it.

The place where they meet is given explicitly: tcp://host:port (rank 0 listens) or file:///path,
which says that all of them are on this machine.
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
    """What ranks do together. Every rank calls the same methods in the same order, with as many
    rows. Sums are added in fp32 in the order of the ranks: the same bits everywhere, for any
    number of rows. Where the ops have a recorder, a collective is recorded or raises NotRecordable.

    x: [n, width], rows contiguous inside; whole tensors for all_reduce, broadcast, send and recv.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Replace x on every rank by the sum over the ranks."""
        ...

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """The x of all ranks side by side, [n, columns]: each has ⌈columns / ranks⌉ of them, the
        last ones what is left."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's columns of the sum over the ranks, [n, width / ranks]."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Block r of x's columns goes to rank r; that of the result came from rank r."""
        ...

    def gather_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """The rows that the ranks give, those of rank 0 first: [count, width].

        x: this rank's rows first. rows: as `parallel.joint.DPAttentionRows.table`, which says
        how many each rank gives, `count` in all. Here and below every rank has rows of its own.
        """
        ...

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """Of the sum of x over the ranks the `count` rows that `rows` calls this rank's."""
        ...

    def gather_columns(self, x: Tensor, columns: int, rows: Tensor, count: int) -> Tensor:
        """Of what `all_gather` gives the `count` rows that `rows` calls this rank's."""
        ...

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int, rows: Tensor) -> Tensor:
        """As `gather_rows`, but a row goes to the ranks alone that have one of its experts.

        places: [count, per_token] int64, of the rows of all ranks: the place of each pair of a row
        and an expert; places are numbered through all ranks, `of_rank` of them on each.
        returns: [count, width]; what lies at rows that have not come means nothing.
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
        """The way back: the `count` rows that `rows` calls this rank's, from wherever their experts
        are.

        x: [n, width], of which the rows count that have an expert on this rank; or if `is_apart`
        [n, per_token · width], of which those pairs count.
        rows: None where all ranks have the same rows.
        returns: [count, width], the sum over those ranks; if `is_apart` [count, per_token · width].
        """
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace x on every rank by that of rank `source`."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Give x to rank `to`, which calls `recv`; nobody else takes part."""
        ...

    def recv(self, x: Tensor, source: int) -> None:
        """Replace x by what rank `source` sends next."""
        ...


class NamedCollectives(Collectives, Protocol):
    """Those of devices with operators that exchange rows themselves."""

    def name(self) -> str:
        """What these operators call the group."""
        ...


@dataclass(frozen=True)
class Meeting:
    """Who meets where.

    Attributes:
        timeout_s: a rank that waits longer than this for another one raises.
        recorder: of the ops beside which the collectives run; None where nothing is recorded.
        name: of the group, where several groups of a replica meet at one address.
        is_crowded: this machine's ranks have more threads than cores.
        is_exchange: operators of the device alone use the group.
        slot_bytes: what a rank can put before the others at once; 0 = as much as is usual.
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

    @property
    def path(self) -> str:
        """The file that the ranks of one machine meet at; "" when they may be on several.

        Raises:
            ConfigError: an address of neither kind.
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
        declines: why it cannot serve a meeting; None when it can. The same on every rank.
        open: meet the other ranks; returns when all have come.
    """

    declines: Callable[[Meeting], str | None]
    open: Callable[[Meeting], Collectives]


COLLECTIVES: Table[Transport] = Table(
    "collective library",
    {
        "shared": "banyan.parallel.shared:SHARED",
        "gloo": "banyan.parallel.gloo:GLOO",
        "hccl": "banyan.ascend.hccl:HCCL",
    },
    "banyan.collectives",
)


def open_collectives(meeting: Meeting, names: Sequence[str]) -> Collectives:
    """Meet the other ranks over the first of these libraries that can serve.

    Raises:
        ConfigError: none of them can.
    """
    declined: list[str] = []
    for name in names:
        transport = COLLECTIVES.load(name)
        reason = transport.declines(meeting)
        if reason is not None:
            declined.append(f"{name}: {reason}")
            continue
        if meeting.rank == 0 and not meeting.name:
            why = f" ({'; '.join(declined)})" if declined else ""
            log.info("%d ranks work together by %s%s", meeting.size, name, why)
        return transport.open(meeting)
    raise ConfigError(f"no collectives for {meeting.size} ranks: {'; '.join(declined)}")
