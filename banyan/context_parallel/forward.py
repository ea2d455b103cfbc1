"""ContextParallelForward: runs one rank's share of each step's tokens, with another Forward.

Attention gathers keys and values of all shares, so every rank's pages are complete. The hidden
states of all shares are gathered too, so every rank computes all logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from banyan.context_parallel.split import ContextParallelSplit, split_batch
from banyan.dp_attention.batch import ContextParallelBatch
from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepAttention
from banyan.ops.api import OpTime
from banyan.parallel.groups import Group
from banyan.runner.attention import AttentionBackend, StepGeometry
from banyan.runner.batch import Batch
from banyan.runner.forward import Forward
from banyan.runner.multi_step import MultiStepRunner
from banyan.runner.sampler import Sampled


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
