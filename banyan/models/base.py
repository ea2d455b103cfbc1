"""The interface between the runner and a model."""

from typing import Protocol

from torch import Tensor

from banyan.layers.cache_spec import LayerCache
from banyan.layers.step_inputs import StepInputs
from banyan.model_config.model_config import ModelConfig


class Model(Protocol):
    """One rank's part of a model, with weights.

    Attributes:
        caches: caches of its layers, by layer number.
        prunes_to_outputs: supports `StepInputs.output_tokens`.
    """

    model_config: ModelConfig
    caches: list[LayerCache]
    prunes_to_outputs: bool

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
