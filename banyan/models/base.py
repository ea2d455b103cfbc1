"""The interface between the runner and a model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from banyan.layers.cache_spec import LayerCache
from banyan.layers.step_inputs import StepInputs
from banyan.model_config.model_config import ModelConfig
from banyan.models.towers.vision import Tower

NO_TOWERS: Mapping[str, Tower] = MappingProxyType({})
"""Of a model that makes no features."""


class Model(Protocol):
    """One rank's part of a model, with weights.

    Attributes:
        caches: caches of its layers, by layer number.
        prunes_to_outputs: supports `StepInputs.output_tokens`.
        takes_features: supports `StepInputs.feature_rows`.
    """

    model_config: ModelConfig
    caches: list[LayerCache]
    prunes_to_outputs: bool
    takes_features: bool

    @property
    def towers(self) -> Mapping[str, Tower]:
        """Content kind -> what makes features of it."""
        ...

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, of all tokens or of `output_tokens`,
        [tokens, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled: [n, hidden_size]; returns scores [n, classes], or `pooled` if there are no
        classes."""
        ...
