"""ContextParallelForward: a rank's share of each step through the model, by another Forward.

Hidden states come back of all shares, so that every rank makes the logits that are wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from banyan.context_parallel.split import ContextParallelSplit, split_batch
from banyan.dp_attention.batch import DividedBatch
from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepAttention
from banyan.ops.api import OpTime
from banyan.parallel.groups import Group
from banyan.runner.attention.base import AttentionBackend, StepGeometry
from banyan.runner.batch import Batch
from banyan.runner.forward import Forward
from banyan.runner.sampling.sampler import Sampled


class GatheredAttention:
    """
    Args:
        inner: attends; it is given the queries of this rank, and what is kept of all tokens.
        group: ranks with the same heads, each with some of the tokens.
    """

    def __init__(self, inner: AttentionBackend, group: Group) -> None:
        self._inner = inner
        self._group = group

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """geometry: locations of all tokens, share by share; all else of this rank's rows."""
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
        assert kept is not None, "other ranks' latents come from them"
        gather = self.group.gather_rows
        if indexed is not None:
            keys = (gather(indexed.key), gather(indexed.key_turned))
            indexed = replace(indexed, key=keys[0], key_turned=keys[1])
        kept = (gather(kept[0]), gather(kept[1]))
        return self.inner.latent(spec, q, q_turned, kept, indexed)

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return self.inner.latent_pages(layer)


class ContextParallelForward:
    """Implements `Forward`.

    Args:
        inner: runs a share; its model gives the hidden states of all shares.
        divided: what the layers of this rank go by.
    """

    def __init__(self, inner: Forward, divided: DividedBatch) -> None:
        self.watch: Callable[[list[OpTime]], None] | None = None
        self.how, self.is_recorded = inner.how, inner.is_recorded
        self.results_are_final = inner.results_are_final
        self._inner = inner
        self._divided = divided
        self._split: ContextParallelSplit | None = None

    def run(self, batch: Batch) -> None:
        divided = self._divided
        split = split_batch(batch, divided.share, divided.replicas, divided.split)
        divided.enter(split.counts)
        self._split = split
        self._inner.watch = self.watch
        self._inner.run(split.part)

    def multi_step(self, batch: Batch, steps: int, number: int, tell: int, bell: int) -> None:
        return None

    def told(self, number: int) -> None:
        return None

    def interrupt(self, number: int) -> None:
        """There is nothing to end."""

    def left(self, batch: Batch) -> Tensor:
        raise NotImplementedError("tokens are divided among the ranks of one stage")

    def turn_to(self, batch: Batch) -> None:
        raise NotImplementedError("tokens are divided among the ranks of one stage")

    def next_tokens(self) -> Sampled | None:
        return self._inner.next_tokens()

    def next_logits(self, batch: Batch) -> Tensor:
        return self._inner.next_logits(self._now.part)

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._inner.logits(self._now.places[tokens])

    def hidden(self, tokens: np.ndarray) -> Tensor:
        return self._inner.hidden(self._now.places[tokens])

    def tapped(self, tokens: np.ndarray) -> Tensor:
        return self._inner.tapped(self._now.places[tokens])

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._inner.targets(self._now.part)

    def op_times(self) -> list[OpTime]:
        return self._inner.op_times()

    @property
    def _now(self) -> ContextParallelSplit:
        assert self._split is not None, "no step has run"
        return self._split
