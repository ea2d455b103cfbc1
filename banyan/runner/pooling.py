"""Pooler: from the hidden states of a step to one vector for each row that wants it."""

import numpy as np
import torch
from torch import Tensor

from banyan.lora.slots import AdapterSlots
from banyan.messages.plan import POOL
from banyan.model_config.model_config import CLS, MEAN, Pooling
from banyan.models.base import Model
from banyan.ops.lora import AdapterTokens
from banyan.runner.batch import Batch
from banyan.runner.forward import Forward


class Pooler:
    """
    Args:
        pooling: which tokens count.
        model: its head, if it has one, turns the pooled states into scores of classes.
        adapters: of each slot, where there may be some; the head may depend on them too.
    """

    def __init__(
        self, pooling: Pooling, model: Model, adapters: AdapterSlots | None = None
    ) -> None:
        self._adapters = adapters
        self._pooling = pooling
        self._model = model

    def read(self, forward: Forward, batch: Batch) -> Tensor | None:
        """Vectors of the rows with POOL, [n, width] fp32; None when there are none."""
        if not batch.wanted & POOL:
            return None
        rows = np.array(batch.wanting(POOL))
        if self._adapters is not None and self._adapters.has_outputs:
            self._adapters.fill_outputs(AdapterTokens(len(rows)), batch.offsets[rows])
        vectors = self._model.classify(self._pool(forward, batch, rows)).float()
        if self._pooling.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _pool(self, forward: Forward, batch: Batch, rows: np.ndarray) -> Tensor:
        """returns: [n, hidden]."""
        firsts, ends = batch.offsets[rows], batch.offsets[rows + 1]
        if self._pooling.kind == MEAN:
            spans = zip(firsts, ends, strict=True)
            return torch.stack([forward.hidden(np.arange(a, b)).mean(0) for a, b in spans])
        return forward.hidden(firsts if self._pooling.kind == CLS else ends - 1)
