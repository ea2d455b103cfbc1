"""Groups of ranks by purpose: who shares the heads, the inner width, the experts, the vocabulary.

A layer is handed the one group that its weights are cut over and knows no other, so a layout of
ranks is a choice made here and nowhere else. A group of one needs no library and costs nothing.

The ranks of a group have the same rows, unless they are of several replicas or compute shares of a
step: then a layer works on the rows of all of them, between `gather_rows` and `reduce_rows`, which
else change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from banyan.dp_attention.batch import DividedBatch, DPAttentionBatch, DPAttentionRows
from banyan.ops.api import Recorder
from banyan.ops.experts_api import Ranks
from banyan.parallel.collectives import (
    Collectives,
    Meeting,
    NamedCollectives,
    open_collectives,
)

DEFAULT_TIMEOUT_S = 300.0


class Group:
    """Ranks that share something, and what they do together.

    Args:
        rank: this rank's place in the group, 0 … size − 1.
        collectives: None only for a group of one.
        joint: whose rows its layers work on; None where all ranks have the same.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Collectives | None = None,
        joint: DPAttentionRows | None = None,
    ) -> None:
        assert 0 <= rank < size and (size == 1 or collectives is not None)
        self.rank = rank
        self.size = size
        self._collectives = collectives
        self._joint = joint

    def of_rows(self, joint: DPAttentionRows) -> "Group":
        """The same ranks, which are of several replicas and have rows of their own."""
        return Group(self.rank, self.size, self._collectives, joint)

    @property
    def ranks(self) -> Ranks:
        """The group as operators of the device know it; only of `Groups.exchange`."""
        return Ranks(cast(NamedCollectives, self._collectives).name(), self.rank, self.size)

    def most_rows(self, mine: int) -> int:
        """Of any replica in the step at hand, where this one has `mine`."""
        return mine if self._joint is None else max(self._joint.counts)

    @property
    def gathers(self) -> bool:
        """Whether a layer of the group works on other rows than this rank's own."""
        return self._joint is not None

    def gather_rows(self, x: Tensor) -> Tensor:
        """The rows that a layer works on, those of all replicas: [all, width] from [n, width]."""
        if self._joint is None or self._collectives is None:
            return x
        rows = self._joint
        return self._collectives.gather_rows(x, rows.table, rows.all_of(len(x)))

    def reduce_rows(self, x: Tensor) -> Tensor:
        """This replica's rows of the sum over the ranks: [n, width] from [all, width]; x itself is
        used for it and must not be needed any more."""
        if self._joint is None or self._collectives is None:
            return self.all_reduce(x)
        rows = self._joint
        return self._collectives.reduce_rows(x, rows.table, rows.own_of(len(x)))

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int) -> Tensor:
        """As gather_rows, but a row comes to the ranks of its experts alone; see
        `Collectives.dispatch_rows`. places: [all, per_token], of the rows of all replicas."""
        if self._joint is None or self._collectives is None:
            return x
        return self._collectives.dispatch_rows(x, places, of_rank, self._joint.table)

    def combine_rows(
        self, x: Tensor, places: Tensor, of_rank: int, is_apart: bool = False
    ) -> Tensor:
        """This replica's rows of what experts have made of those of all; see
        `Collectives.combine_rows`."""
        if self._collectives is None:
            return x
        rows, count = None, len(x)
        if self._joint is not None:
            rows, count = self._joint.table, self._joint.own_of(count)
        return self._collectives.combine_rows(x, places, of_rank, rows, count, is_apart)

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """This replica's rows of all columns: [n, columns] from this rank's columns of [all, …]."""
        if self._joint is None or self._collectives is None:
            return self.all_gather(x, columns)
        rows = self._joint
        return self._collectives.gather_columns(x, columns, rows.table, rows.own_of(len(x)))

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
        vocabulary: share the token ids of the embedding.
        head: share the token ids of the logits.
        stages: hold the layers one part after another, the first part in front.
        everyone: all ranks of all replicas that work on one batch.
        joint: the rows of such a batch; None for a replica by itself.
        dense_ffn: as `ffn`, of the blocks without experts among others that have them.
        context: have the same heads, and each computes some of a step's tokens.
        divided: whose they are; None where every rank computes all of them.
    """

    world: Group
    attention: Group
    ffn: Group
    experts: Group
    expert_ffn: Group
    vocabulary: Group
    head: Group
    stages: Group
    everyone: Group
    dense_ffn: Group
    joint: DPAttentionBatch | None = None
    context: Group = field(default_factory=Group)
    divided: DividedBatch | None = None
    exchange: Group = field(default_factory=Group)
    """The ranks of `experts` once more, for the device's own exchange of rows."""

    @classmethod
    def of(cls, group: Group) -> "Groups":
        """Tensor parallelism: the same ranks share everything, experts within each of them."""
        return cls(
            world=group,
            attention=group,
            ffn=group,
            experts=Group(),
            expert_ffn=group,
            vocabulary=group,
            head=group,
            stages=Group(),
            everyone=group,
            dense_ffn=group,
        )

    @classmethod
    def with_experts_apart(cls, group: Group) -> "Groups":
        """As `of`, but each rank holds some of the experts whole."""
        return replace(cls.of(group), experts=group, expert_ffn=Group())

    def in_stages(self, world: Group, stages: Group) -> "Groups":
        """These groups of one stage among several; the first has the embedding, and all ranks share
        the logits."""
        return replace(self, world=world, head=world, stages=stages, everyone=world)

    def with_dense_whole(self) -> "Groups":
        """These groups, but each rank has the feed-forward blocks without experts whole."""
        return replace(self, dense_ffn=Group())

    @classmethod
    def of_replicas(
        cls, mine: Group, everyone: Group, joint: DPAttentionBatch, are_experts_apart: bool
    ) -> "Groups":
        """Data-parallel attention: each replica attends by itself, and all of them share the
        feed-forward blocks and the head.

        Args:
            mine: the ranks of this replica.
            everyone: those of all replicas.
        """
        over_tokens = everyone.of_rows(joint.tokens)
        shared = cls.of(over_tokens)
        if are_experts_apart:
            shared = cls.with_experts_apart(over_tokens)
        return replace(
            shared,
            world=mine,
            attention=mine,
            vocabulary=mine,
            head=everyone.of_rows(joint.outputs),
            everyone=everyone,
            joint=joint,
        )

    @classmethod
    def of_shares(
        cls,
        mine: Group,
        context: Group,
        everyone: Group,
        divided: DividedBatch,
        are_experts_apart: bool,
    ) -> "Groups":
        """Context parallelism: the ranks of each share of a step's tokens attend for them, and all
        ranks share the feed-forward blocks and the head.

        Args:
            mine: the ranks of this share.
            context: those of all shares with the same heads.
            everyone: all of them.
        """
        alike = cls.of_replicas(mine, everyone, divided, are_experts_apart)
        return replace(
            alike,
            world=everyone,
            head=everyone,
            joint=None,
            context=context.of_rows(divided.context),
            divided=divided,
        )

    def of_one_replica(self) -> "Groups":
        """The same cuts among the ranks of this replica alone, for what it runs by itself."""
        are_apart = self.experts.size > 1
        groups = Groups.with_experts_apart(self.world) if are_apart else Groups.of(self.world)
        return groups.with_dense_whole() if self.dense_ffn.size == 1 else groups

    def with_heads_apart(self) -> "Groups":
        """These groups, but each replica has the weight of the logits by itself."""
        return replace(self, head=self.world)


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
    replica: int = 0,
    replicas: int = 1,
    replicates_lm_head: bool = False,
    is_dense_whole: bool = False,
    shares: int = 1,
    split: str = "",
    slot_bytes: int = 0,
    has_exchange: bool = False,
) -> Groups:
    """Meet the other ranks at `address`; returns when all have come.

    Args:
        rank: stage · size + place within the stage, or share · size + place within the share.
        size: ranks of one stage, or of one share.
        address: tcp://host:port or file:///path, the same on every rank; "" for one rank.
        libraries: names of collective libraries, best first (`Traits.collectives`).
        timeout_s: a rank that waits longer than this for another one raises.
        recorder: of the ops beside which the collectives run (`Ops.recorder`).
        is_crowded: the ranks of this machine have more threads than cores.
        are_experts_apart: each rank holds some experts whole, instead of a cut of each.
        stages: parts that the layers are divided into.
        replica, replicas: which of how many replicas that work on one batch; they have one stage.
        replicates_lm_head: each of them has the weight of the logits by itself.
        is_dense_whole: in a model of experts, each rank has the blocks without any whole.
        shares: that a step's tokens are divided into; there is one stage, and one replica.
        split: how they are divided.
        slot_bytes: what a rank can put before the others at once; 0 = as much as is usual.
        has_exchange: the device exchanges the rows of experts by operators.
    """

    def meet(name: str, place: int, of: int, is_exchange: bool = False) -> Group:
        if of == 1:
            return Group()
        who = (place, of, address, timeout_s, recorder, is_crowded, name)
        met = open_collectives(Meeting(*who, slot_bytes, is_exchange), libraries)
        return Group(place, of, met)

    def finished(groups: Groups, name: str, place: int, of: int) -> Groups:
        """With what every layout may have; name: of those that share experts."""
        groups = groups.with_dense_whole() if is_dense_whole else groups
        if has_exchange:
            groups = replace(groups, exchange=meet(f".sent{name}", place, of, is_exchange=True))
        return groups

    if size * stages * replicas * shares == 1:
        return ALONE
    if replicas > 1:
        where = (replica * size + rank, replicas * size)
        everyone = meet("", *where)
        mine = meet(f".replica{replica}", rank, size)
        joint = DPAttentionBatch(
            replica, replicas, size, recorder, has_outputs=not replicates_lm_head
        )
        groups = Groups.of_replicas(mine, everyone, joint, are_experts_apart)
        groups = groups.with_heads_apart() if replicates_lm_head else groups
        return finished(groups, "", *where)
    stage, place = divmod(rank, size)
    if shares > 1:
        everyone = meet("", rank, size * shares)
        mine = meet(f".share{stage}", place, size)
        context = meet(f".context{place}", stage, shares) if size > 1 else everyone
        divided = DividedBatch(stage, shares, size, split, recorder)
        groups = Groups.of_shares(mine, context, everyone, divided, are_experts_apart)
        return finished(groups, "", rank, size * shares)
    world = meet("", rank, size * stages)
    mine = meet(f".stage{stage}", place, size) if stages > 1 else world
    groups = Groups.with_experts_apart(mine) if are_experts_apart else Groups.of(mine)
    groups = finished(groups, str(stage), place, size)
    if stages == 1:
        return groups
    line = meet(f".line{place}", stage, stages) if size > 1 else world
    return groups.in_stages(world, line)
