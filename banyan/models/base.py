"""What the runner needs of a model, whatever it is made of."""

from typing import Protocol

from torch import Tensor

from banyan.layers.cache_spec import LayerCache
from banyan.layers.step_inputs import StepInputs
from banyan.model_config.model_config import ModelConfig


class Model(Protocol):
    """One rank's share of a model, filled with weights.

    Attributes:
        caches: what its layers keep between steps, by layer number.
        narrows: it goes on with some tokens alone behind its last attention, `StepInputs.chosen`.
    """

    model_config: ModelConfig
    caches: list[LayerCache]
    narrows: bool

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, of the step's tokens or of those chosen,
        [tokens, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled: [n, hidden_size]; returns scores [n, classes], or the states where none are."""
        ...
