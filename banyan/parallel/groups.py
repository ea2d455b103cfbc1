"""Groups of ranks by purpose: who shares the heads, the inner width, the experts, the vocabulary.

A layer is handed the one group that its weights are cut over and knows no other, so a layout of
ranks is a choice made here and nowhere else. A group of one needs no library and costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from banyan.ops.api import Recorder
from banyan.parallel.collectives import Collectives, Meeting, open_collectives

DEFAULT_TIMEOUT_S = 300.0


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
            self._collectives.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """The x of all ranks side by side, [n, columns]; see `Collectives.all_gather`."""
        if self._collectives is None:
            return x
        return self._collectives.all_gather(x, columns)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's columns of the sum over the ranks, [n, width / size]."""
        return x if self._collectives is None else self._collectives.reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Block r of x's columns goes to rank r; that of the result came from rank r."""
        return x if self._collectives is None else self._collectives.all_to_all(x)

    def all_to_all_rows(self, x: Tensor, counts: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Rows to the ranks that shall have them; see `Collectives.all_to_all_rows`."""
        if self._collectives is None:
            return x, counts
        return self._collectives.all_to_all_rows(x, counts, room)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source`, written into x on every rank."""
        if self._collectives is not None:
            self._collectives.broadcast(x, source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Give x to rank `to`, which calls `recv`; nobody else takes part."""
        assert self._collectives is not None, "a group of one has nobody to talk to"
        self._collectives.send(x, to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        """What rank `source` sends next, written into x."""
        assert self._collectives is not None, "a group of one has nobody to talk to"
        self._collectives.recv(x, source)
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
        stages: hold the layers one part after another, the first part in front.
    """

    world: Group
    attention: Group
    ffn: Group
    experts: Group
    expert_ffn: Group
    vocabulary: Group
    stages: Group

    @classmethod
    def of(cls, group: Group) -> "Groups":
        """Tensor parallelism: the same ranks share everything, experts within each of them."""
        return cls(group, group, group, Group(), group, group, Group())

    @classmethod
    def with_experts_apart(cls, group: Group) -> "Groups":
        """As `of`, but each rank holds some of the experts whole."""
        return replace(cls.of(group), experts=group, expert_ffn=Group())

    def in_stages(self, world: Group, stages: Group) -> "Groups":
        """These groups of one stage among several; all ranks share the vocabulary."""
        return replace(self, world=world, vocabulary=world, stages=stages)


ALONE = Groups.of(Group())
"""One rank that holds all."""


def open_groups(
    rank: int,
    size: int,
    address: str,
    libraries: Sequence[str] = ("shared", "gloo"),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    recorder: Recorder | None = None,
    is_crowded: bool = False,
    are_experts_apart: bool = False,
    stages: int = 1,
) -> Groups:
    """Meet the other ranks at `address`; returns when all have come.

    Args:
        rank: stage · size + place within the stage.
        size: ranks of one stage.
        address: tcp://host:port or file:///path, the same on every rank; "" for one rank.
        libraries: names of collective libraries, best first (`Traits.collectives`).
        timeout_s: a rank that waits longer than this for another one raises.
        recorder: of the ops beside which the collectives run (`Ops.recorder`).
        is_crowded: the ranks of this machine have more threads than cores.
        are_experts_apart: each rank holds some experts whole, instead of a cut of each.
        stages: parts that the layers are divided into.
    """

    def meet(name: str, place: int, of: int) -> Group:
        if of == 1:
            return Group()
        meeting = Meeting(place, of, address, timeout_s, recorder, is_crowded, name)
        return Group(place, of, open_collectives(meeting, libraries))

    if size * stages == 1:
        return ALONE
    stage, place = divmod(rank, size)
    world = meet("", rank, size * stages)
    mine = meet(f".stage{stage}", place, size) if stages > 1 else world
    groups = Groups.with_experts_apart(mine) if are_experts_apart else Groups.of(mine)
    if stages == 1:
        return groups
    line = meet(f".line{place}", stage, stages) if size > 1 else world
    return groups.in_stages(world, line)
