"""Groups of ranks by purpose: heads, inner width, experts, vocabulary, pipeline stages.

A layer gets the one group over which its weights are split, so `open_groups` is the only place that
depends on the layout of ranks. A group of one rank needs no library and costs nothing.

Normally all ranks of a group have the same rows. With DP attention or context parallelism they have
rows of their own. A layer then gathers them with `gather_rows` and returns to its own rows with
`reduce_rows`; otherwise `gather_rows` changes nothing and `reduce_rows` is an all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from banyan.dp_attention.batch import ContextParallelBatch, DPAttentionBatch, DPAttentionRows
from banyan.ops.api import Recorder
from banyan.ops.experts_api import Ranks
from banyan.parallel.collectives import (
    Collectives,
    NamedCollectives,
    Rendezvous,
    open_collectives,
)

DEFAULT_TIMEOUT_S = 300.0


class Group:
    """Ranks that share weights or work, with their collectives.

    Args:
        rank: index of this rank in the group, 0 … size − 1.
        collectives: None only for a group of one.
        own_rows: row counts if the ranks have rows of their own; None if all have the same rows.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Collectives | None = None,
        own_rows: DPAttentionRows | None = None,
    ) -> None:
        assert 0 <= rank < size and (size == 1 or collectives is not None)
        self.rank = rank
        self.size = size
        self._collectives = collectives
        self._own_rows = own_rows

    def of_rows(self, own_rows: DPAttentionRows) -> "Group":
        """The same ranks, each with rows of its own."""
        return Group(self.rank, self.size, self._collectives, own_rows)

    @property
    def ranks(self) -> Ranks:
        """The group's name for operators of the device; only valid for `Groups.exchange`."""
        return Ranks(cast(NamedCollectives, self._collectives).name(), self.rank, self.size)

    def most_rows(self, mine: int) -> int:
        """Largest row count of any replica in this step; `mine` is this replica's count."""
        return mine if self._own_rows is None else max(self._own_rows.counts)

    @property
    def gathers(self) -> bool:
        """Whether layers of the group also work on rows of other ranks."""
        return self._own_rows is not None

    def gather_rows(self, x: Tensor) -> Tensor:
        """The rows of all replicas: [all, width] from [n, width]."""
        if self._own_rows is None or self._collectives is None:
            return x
        rows = self._own_rows
        return self._collectives.gather_rows(x, rows.table, rows.all_of(len(x)))

    def reduce_rows(self, x: Tensor) -> Tensor:
        """This replica's rows of the sum over the ranks: [n, width] from [all, width].

        x is overwritten.
        """
        if self._own_rows is None or self._collectives is None:
            return self.all_reduce(x)
        rows = self._own_rows
        return self._collectives.reduce_rows(x, rows.table, rows.own_of(len(x)))

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int) -> Tensor:
        """Send each row only to the ranks that hold one of its experts.

        See `Collectives.dispatch_rows`. places: [all, per_token], for the rows of all replicas.
        """
        if self._own_rows is None or self._collectives is None:
            return x
        return self._collectives.dispatch_rows(x, places, of_rank, self._own_rows.table)

    def combine_rows(
        self, x: Tensor, places: Tensor, of_rank: int, is_apart: bool = False
    ) -> Tensor:
        """This replica's rows of the expert outputs; see `Collectives.combine_rows`."""
        if self._collectives is None:
            return x
        rows, count = None, len(x)
        if self._own_rows is not None:
            rows, count = self._own_rows.table, self._own_rows.own_of(count)
        return self._collectives.combine_rows(x, places, of_rank, rows, count, is_apart)

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """All columns of this replica's rows: [n, columns]. x: this rank's columns of all rows."""
        if self._own_rows is None or self._collectives is None:
            return self.all_gather(x, columns)
        rows = self._own_rows
        return self._collectives.gather_columns(x, columns, rows.table, rows.own_of(len(x)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks. x is overwritten."""
        if self._collectives is not None:
            self._collectives.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """The x of all ranks, side by side: [n, columns]; see `Collectives.all_gather`."""
        if self._collectives is None:
            return x
        return self._collectives.all_gather(x, columns)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's columns of the sum over the ranks, [n, width / size]."""
        return x if self._collectives is None else self._collectives.reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Column block r of x goes to rank r; column block r of the result comes from rank r."""
        return x if self._collectives is None else self._collectives.all_to_all(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x on every rank with the x of rank `source`."""
        if self._collectives is not None:
            self._collectives.broadcast(x, source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to rank `to`, which calls `recv`. No other rank takes part."""
        assert self._collectives is not None, "a group of one has no peer"
        self._collectives.send(x, to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the tensor that rank `source` sends next."""
        assert self._collectives is not None, "a group of one has no peer"
        self._collectives.recv(x, source)
        return x


@dataclass(frozen=True)
class Groups:
    """The groups of one rank.

    Attributes:
        world: all ranks of the replica; they run the same plans.
        attention: ranks that share the attention heads.
        ffn: ranks that share the inner width of feed-forward blocks.
        experts: ranks that share the routed experts.
        expert_ffn: ranks that share the inner width of each routed expert.
        vocabulary: ranks that share the token ids of the embedding.
        head: ranks that share the token ids of the logits.
        stages: one rank of each pipeline stage, in order of the layers.
        everyone: all ranks of all replicas that work on one batch.
        dense_ffn: like `ffn`, for blocks without experts in a model of experts.
        dp_batch: row counts of all replicas with DP attention; None without.
        context: ranks that have the same heads and different tokens of a step.
        cp_batch: row counts of all shares with context parallelism; None without.
        exchange: the ranks of `experts`, for the device's own row exchange.
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
    dp_batch: DPAttentionBatch | None = None
    context: Group = field(default_factory=Group)
    cp_batch: ContextParallelBatch | None = None
    exchange: Group = field(default_factory=Group)

    @classmethod
    def of(cls, group: Group) -> "Groups":
        """Tensor parallelism: the same ranks share everything; each expert is split over them."""
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
        """Expert parallelism: like `of`, but each rank holds some whole experts."""
        return replace(cls.of(group), experts=group, expert_ffn=Group())

    def in_stages(self, world: Group, stages: Group) -> "Groups":
        """Pipeline parallelism: make these the groups of one stage.

        The first stage holds the embedding. All ranks share the logits.
        """
        return replace(self, world=world, head=world, stages=stages, everyone=world)

    def with_dense_whole(self) -> "Groups":
        """The same groups, but each rank holds whole feed-forward blocks where there are no
        experts."""
        return replace(self, dense_ffn=Group())

    @classmethod
    def of_replicas(
        cls, mine: Group, everyone: Group, dp_batch: DPAttentionBatch, are_experts_apart: bool
    ) -> "Groups":
        """DP attention: each replica computes its own attention; all of them share the
        feed-forward blocks and the head.

        Args:
            mine: the ranks of this replica.
            everyone: the ranks of all replicas.
        """
        over_tokens = everyone.of_rows(dp_batch.tokens)
        shared = cls.of(over_tokens)
        if are_experts_apart:
            shared = cls.with_experts_apart(over_tokens)
        return replace(
            shared,
            world=mine,
            attention=mine,
            vocabulary=mine,
            head=everyone.of_rows(dp_batch.outputs),
            everyone=everyone,
            dp_batch=dp_batch,
        )

    @classmethod
    def of_shares(
        cls,
        mine: Group,
        context: Group,
        everyone: Group,
        cp_batch: ContextParallelBatch,
        are_experts_apart: bool,
    ) -> "Groups":
        """Context parallelism: the ranks of each share compute attention for its tokens; all ranks
        share the feed-forward blocks and the head.

        Args:
            mine: the ranks of this share.
            context: the ranks of all shares that have the same heads.
            everyone: the ranks of all shares.
        """
        alike = cls.of_replicas(mine, everyone, cp_batch, are_experts_apart)
        return replace(
            alike,
            world=everyone,
            head=everyone,
            dp_batch=None,
            context=context.of_rows(cp_batch.context),
            cp_batch=cp_batch,
        )

    def of_one_replica(self) -> "Groups":
        """The same splits among the ranks of this replica, for models that it runs by itself."""
        are_apart = self.experts.size > 1
        groups = Groups.with_experts_apart(self.world) if are_apart else Groups.of(self.world)
        return groups.with_dense_whole() if self.dense_ffn.size == 1 else groups

    def with_heads_apart(self) -> "Groups":
        """The same groups, but each replica holds the whole weight of the logits."""
        return replace(self, head=self.world)


ALONE = Groups.of(Group())
"""One rank that holds everything."""


@dataclass(frozen=True)
class GroupsConfig:
    """The layout of the ranks, and how they reach each other.

    Attributes:
        rank: stage · size + index in the stage, or share · size + index in the share.
        size: ranks of one stage, or of one share.
        address: tcp://host:port or file:///path, the same on every rank; "" for one rank.
        libraries: names of collective libraries, best first (`Traits.collectives`).
        timeout_s: longest wait for another rank; then an error is raised.
        recorder: recorder of the ops (`Ops.recorder`).
        is_crowded: the ranks of this machine have more threads than cores.
        are_experts_apart: each rank holds some whole experts, not a part of each.
        stages: number of pipeline stages.
        replica, replicas: this replica and the number of replicas with DP attention.
        replicates_lm_head: each replica holds the whole weight of the logits.
        is_dense_whole: in a model of experts, each rank holds whole blocks without experts.
        shares: context parallel size; then there are one stage and one replica.
        split: how a step's tokens are split over the shares (`context_parallel.split.SPLITS`).
        slot_bytes: bytes that a rank can offer to the others at once; 0 = the library's default.
        has_exchange: operators of the device exchange the rows of experts.
        interface: network interface that a rank listens on; "" = the one that reaches the others.
        uses_own_sums: sums over ranks are the library's own (--disable-custom-all-reduce).
        checks_peers: known sums show whether devices really reach each other's memory.
    """

    rank: int
    size: int
    address: str
    libraries: Sequence[str] = ("shared", "gloo")
    timeout_s: float = DEFAULT_TIMEOUT_S
    recorder: Recorder | None = None
    is_crowded: bool = False
    are_experts_apart: bool = False
    stages: int = 1
    replica: int = 0
    replicas: int = 1
    replicates_lm_head: bool = False
    is_dense_whole: bool = False
    shares: int = 1
    split: str = ""
    slot_bytes: int = 0
    has_exchange: bool = False
    interface: str = ""
    uses_own_sums: bool = False
    checks_peers: bool = False


def open_groups(config: GroupsConfig) -> Groups:
    """Connect to the other ranks; returns when all of them have come."""
    if config.size * config.stages * config.replicas * config.shares == 1:
        return ALONE
    if config.replicas > 1:
        return _dp_attention_groups(config)
    if config.shares > 1:
        return _context_parallel_groups(config)
    return _staged_groups(config)


def _dp_attention_groups(config: GroupsConfig) -> Groups:
    replica, size = config.replica, config.size
    rank_of_all, num_ranks = replica * size + config.rank, config.replicas * size
    everyone = _meet(config, "", rank_of_all, num_ranks)
    mine = _meet(config, f".replica{replica}", config.rank, size)
    dp_batch = DPAttentionBatch(
        replica,
        config.replicas,
        size,
        config.recorder,
        has_outputs=not config.replicates_lm_head,
    )
    groups = Groups.of_replicas(mine, everyone, dp_batch, config.are_experts_apart)
    groups = groups.with_heads_apart() if config.replicates_lm_head else groups
    return _finished(config, groups, "", rank_of_all, num_ranks)


def _context_parallel_groups(config: GroupsConfig) -> Groups:
    rank, size, shares = config.rank, config.size, config.shares
    share, place = divmod(rank, size)
    everyone = _meet(config, "", rank, size * shares)
    mine = _meet(config, f".share{share}", place, size)
    context = _meet(config, f".context{place}", share, shares) if size > 1 else everyone
    cp_batch = ContextParallelBatch(share, shares, size, config.split, config.recorder)
    groups = Groups.of_shares(mine, context, everyone, cp_batch, config.are_experts_apart)
    return _finished(config, groups, "", rank, size * shares)


def _staged_groups(config: GroupsConfig) -> Groups:
    """Tensor and expert parallelism, in one or more pipeline stages."""
    size, stages = config.size, config.stages
    stage, place = divmod(config.rank, size)
    world = _meet(config, "", config.rank, size * stages)
    mine = _meet(config, f".stage{stage}", place, size) if stages > 1 else world
    groups = Groups.with_experts_apart(mine) if config.are_experts_apart else Groups.of(mine)
    groups = _finished(config, groups, str(stage), place, size)
    if stages == 1:
        return groups
    pipeline = _meet(config, f".line{place}", stage, stages) if size > 1 else world
    return groups.in_stages(world, pipeline)


def _meet(
    config: GroupsConfig, name: str, rank: int, size: int, is_exchange: bool = False
) -> Group:
    """Open one group; `name` is the same on all its ranks."""
    if size == 1:
        return Group()
    rendezvous = Rendezvous(
        rank,
        size,
        config.address,
        config.timeout_s,
        config.recorder,
        config.is_crowded,
        name,
        config.slot_bytes,
        is_exchange,
        config.interface,
        config.uses_own_sums,
        config.checks_peers,
    )
    return Group(rank, size, open_collectives(rendezvous, config.libraries))


def _finished(config: GroupsConfig, groups: Groups, name: str, rank: int, size: int) -> Groups:
    """Add the options that every layout has; `name`, `rank`, `size`: the group of the experts."""
    groups = groups.with_dense_whole() if config.is_dense_whole else groups
    if config.has_exchange:
        exchange = _meet(config, f".sent{name}", rank, size, is_exchange=True)
        groups = replace(groups, exchange=exchange)
    return groups
