"""ContextParallelForward: runs one rank's share of each step's tokens, with another Forward.

Rows are cut into pieces. A piece is a row like any other: of the same slot, with a context that
ends where the piece begins. Attention gathers keys and values of all shares before any is read, so
every rank's pages are complete, and a token's result does not depend on the rank that computes it.
The hidden states of all shares are gathered too, so every rank computes all logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from banyan.dp_attention.batch import ContextParallelBatch
from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepAttention
from banyan.ops.api import OpTime
from banyan.parallel.groups import Group
from banyan.runner.attention import AttentionBackend, StepGeometry
from banyan.runner.batch import Batch, WholeStep
from banyan.runner.forward import Forward
from banyan.runner.multi_step import MultiStepRunner
from banyan.runner.sampler import Sampled

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Arrays with one entry per piece: row, first token within the row, number of tokens, and the share
that computes it; in the order of the step's tokens."""


@dataclass(frozen=True)
class ContextParallelSplit:
    """
    Attributes:
        part: the batch that this rank computes; it has the outputs of the whole step.
        counts: tokens of each share.
        places: [tokens], index of each of the step's tokens when they are ordered share by share.
    """

    part: Batch
    counts: list[int]
    places: np.ndarray


def split_batch(batch: Batch, share: int, shares: int, split: str) -> ContextParallelSplit:
    """Split a step; `part` of the result is the share `share`."""
    row, first, count, owner = SPLITS[split](batch.counts, shares)
    order = np.argsort(owner, kind="stable")
    row, first, count, owner = row[order], first[order], count[order], owner[order]
    begins = np.concatenate(([0], np.cumsum(count)))
    shift = np.repeat(batch.offsets[row] + first - begins[:-1], count)
    tokens = np.arange(begins[-1]) + shift  # of the step, share by share
    places = np.empty(len(tokens), np.int64)
    places[tokens] = np.arange(len(tokens))
    slots = np.repeat(batch.slots, batch.counts)[tokens]
    mine = owner == share
    own = np.repeat(mine, count)
    starts, counts = (batch.starts[row] + first)[mine], count[mine]
    sizes = np.bincount(owner, count, shares).astype(np.int64).tolist()
    largest = (max(sizes), int(np.bincount(owner).max()))
    part = replace(
        batch,
        slots=batch.slots[row[mine]],
        starts=starts,
        counts=counts,
        ends=starts + counts,
        offsets=np.concatenate(([0], np.cumsum(counts))),
        last=places[batch.last],
        carried=None if batch.carried is None else batch.carried[torch.from_numpy(tokens[own])],
        whole_step=WholeStep(slots, batch.positions[tokens], *largest),
    )
    return ContextParallelSplit(part, sizes, places)


def share_capacity(tokens: int, rows: int, shares: int, split: str) -> tuple[int, int]:
    """Usual tokens and pieces of one share for a step of so many tokens and rows; rows that are cut
    unevenly may need more."""
    if split == INTERLEAVE:
        most = -(-tokens // shares)
        return most, most
    return -(-tokens // shares) + rows, 2 * rows


def zigzag(counts: np.ndarray, shares: int) -> Pieces:
    """Cut each row into 2 · shares equal pieces; share s gets the s-th piece from both ends, so all
    shares read equally many keys. The first share rotates from row to row."""
    cuts = np.delete(np.arange(2 * shares + 1), shares)  # the middle two belong to one share
    borders = counts[:, None] * cuts // (2 * shares)
    rows, pieces = len(counts), len(cuts) - 1
    owners = np.minimum(np.arange(pieces), np.arange(pieces)[::-1])
    owner = (owners + np.arange(rows)[:, None]) % shares
    row = np.repeat(np.arange(rows), pieces)
    sizes = np.diff(borders, axis=1).ravel()
    there = sizes > 0
    return row[there], borders[:, :-1].ravel()[there], sizes[there], owner.ravel()[there]


def interleave(counts: np.ndarray, shares: int) -> Pieces:
    """Token i of the step belongs to share i mod shares."""
    tokens = int(counts.sum())
    row = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    index = np.arange(tokens)
    return row, index - begins[row], np.ones(tokens, np.int64), index % shares


ZIGZAG, INTERLEAVE = "zigzag", "interleave"
SPLITS: MappingProxyType[str, Callable[[np.ndarray, int], Pieces]] = MappingProxyType(
    {ZIGZAG: zigzag, INTERLEAVE: interleave}
)


class GatheredAttention:
    """Attention of this rank's queries over the keys and values of all context parallel ranks.

    Args:
        inner: attends with the queries of this rank and the keys and values of all tokens.
        group: ranks with the same heads, each with some of the tokens.
    """

    def __init__(self, inner: AttentionBackend, group: Group) -> None:
        self._inner = inner
        self._group = group

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """geometry: locations of all tokens, share by share; the rest is of this rank's rows."""
        return _Bound(self._inner.bind(geometry), self._group)


@dataclass(frozen=True)
class _Bound:
    inner: StepAttention
    group: Group

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        k, v = (self.group.gather_rows(x.flatten(1)).unflatten(1, x.shape[1:]) for x in (k, v))
        return self.inner(spec, q, k, v, sinks)

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        assert kept is not None, "latents are gathered from all ranks"
        gather = self.group.gather_rows
        if indexed is not None:
            keys = (gather(indexed.key), gather(indexed.key_turned))
            indexed = replace(indexed, key=keys[0], key_turned=keys[1])
        kept = (gather(kept[0]), gather(kept[1]))
        return self.inner.latent(spec, q, q_turned, kept, indexed)

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return self.inner.latent_pages(layer)


class ContextParallelForward:
    """Satisfies `Forward`.

    Args:
        inner: runs a share; its model gathers the hidden states of all shares.
        shared: row counts of all shares, which the layers of this rank read.
    """

    multi_steps: MultiStepRunner | None = None

    def __init__(self, inner: Forward, shared: ContextParallelBatch) -> None:
        self.on_op_times: Callable[[list[OpTime]], None] | None = None
        self.how, self.is_recorded = inner.how, inner.is_recorded
        self.results_are_final = inner.results_are_final
        self._inner = inner
        self._shared = shared
        self._split: ContextParallelSplit | None = None

    def run(self, batch: Batch) -> None:
        shared = self._shared
        split = split_batch(batch, shared.share, shared.replicas, shared.split)
        shared.enter(split.counts)
        self._split = split
        self._inner.on_op_times = self.on_op_times
        self._inner.run(split.part)

    def multi_step(
        self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int
    ) -> None:
        return None

    def stage_output(self, batch: Batch) -> Tensor:
        raise NotImplementedError("context parallelism does not combine with pipeline parallelism")

    def select(self, batch: Batch) -> None:
        raise NotImplementedError("context parallelism does not combine with pipeline parallelism")

    def next_tokens(self) -> Sampled | None:
        return self._inner.next_tokens()

    def next_logits(self, batch: Batch) -> Tensor:
        return self._inner.next_logits(self._now.part)

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._inner.logits(self._now.places[tokens])

    def hidden(self, tokens: np.ndarray) -> Tensor:
        return self._inner.hidden(self._now.places[tokens])

    def aux_hidden(self, tokens: np.ndarray) -> Tensor:
        return self._inner.aux_hidden(self._now.places[tokens])

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._inner.targets(self._now.part)

    def op_times(self) -> list[OpTime]:
        return self._inner.op_times()

    @property
    def _now(self) -> ContextParallelSplit:
        assert self._split is not None, "no step has run"
        return self._split
