"""ContextParallelForward: a rank's share of each step through the model, by another Forward.

Hidden states come back of all shares, so that every rank makes the logits that are wanted.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from banyan.context_parallel.split import Division, divide
from banyan.dp_attention.batch import DividedBatch
from banyan.ops.api import OpTime
from banyan.runner.batch import Batch
from banyan.runner.forward import Forward
from banyan.runner.sampling.sampler import Sampled


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
        self._division: Division | None = None

    def run(self, batch: Batch) -> None:
        divided = self._divided
        division = divide(batch, divided.share, divided.replicas, divided.split)
        divided.enter(division.counts)
        self._division = division
        self._inner.watch = self.watch
        self._inner.run(division.part)

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
    def _now(self) -> Division:
        assert self._division is not None, "no step has run"
        return self._division
