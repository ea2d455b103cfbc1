"""DFlashLM: a draft model that predicts a block of tokens at once (DFlash).

Its layers read keys and values computed from auxiliary hidden states of the target model, the same
states in every layer. The newest token and the masks after it attend to each other; the output at a
mask predicts the token at its position. Embedding and head are the target model's. Position j keeps
keys and values of token j's state.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from banyan.families.base import Family
from banyan.layers.attention import Attention
from banyan.layers.build import Build
from banyan.layers.cache_spec import LayerCache
from banyan.layers.embedding import Logits
from banyan.layers.linear import ColumnLinear
from banyan.layers.norm import RMSNorm
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import ModelConfig, Pooling
from banyan.models.base import NO_TOWERS
from banyan.models.decoder import DecoderLayer, DecoderLM
from banyan.parallel.groups import Group


class DFlashLM(DecoderLM):
    """Satisfies `models.base.Model`; a step consists of blocks whose tokens attend to each
    other."""

    def __init__(
        self, model_config: ModelConfig, family: Family, build: Build, served_length: int = 0
    ) -> None:
        super().__init__(model_config, family, build, served_length)
        assert model_config.draft_fields is not None
        del self.embedding, self.head
        self.facts, self.width = model_config.draft_fields, model_config.hidden_size
        outputs, rules = {"": model_config.hidden_size}, {"": ShardRule()}
        inputs = len(model_config.draft_fields.aux_layers) * model_config.hidden_size
        self.join = ColumnLinear(inputs, outputs, rules, False, Group(), build)
        self.state_norm = RMSNorm(model_config.hidden_size, model_config.norm_eps, build)

    def share_embeddings(self, model: DecoderLM) -> None:
        """Use the target model's embedding and head."""
        assert isinstance(model.head, Logits)
        self.embedding, self.head = model.embedding, model.head

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target model whose inputs it reads."""
        return self.facts.aux_layers

    def project_states(self, states: Tensor) -> Tensor:
        """states: [n, aux layers · hidden_size]; returns the input of its layers' keys and values,
        [n, width]."""
        return self.state_norm(self.join(states))

    @property
    def state_writer(self) -> "DFlashStateWriter":
        return DFlashStateWriter(self)


class DFlashStateWriter(nn.Module):
    """Satisfies `models.base.Model`: writes keys and values of the target model's tokens, whose
    projected states arrive as `StepInputs.previous_states`. Has no logits."""

    prunes_to_outputs = False
    takes_features = False
    towers = NO_TOWERS

    def __init__(self, blocks: DFlashLM) -> None:
        super().__init__()
        self.model_config = replace(blocks.model_config, pooling=Pooling())
        self.caches: list[LayerCache] = blocks.caches
        self._blocks = [blocks]  # in a list, so that it is not registered as a submodule

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, hidden_size], the states."""
        (blocks,), states = self._blocks, step.previous_states
        assert states is not None, "the states are its input"
        angles = {rope: rotary(step.positions) for rope, rotary in blocks.rotaries.items()}
        for module in blocks.layers:
            layer = cast(DecoderLayer, module)
            attention = cast(Attention, layer.attention)
            attention.keep(states, angles.get(layer.rope), step)
        return states

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("this model has no logits")
