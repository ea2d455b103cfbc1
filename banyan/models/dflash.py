"""A model that drafts a block at once for another one (DFlash, arXiv 2602.06036).

Its blocks are those of Qwen3. What it knows of a request are states made of what came to some
layers of the other model: each of its layers takes keys and values from them, the same states in
every layer. Behind those it reads the newest token and masks, all of which read each other, and
what it makes of a mask tells the token in the mask's place. Embedding and head are the other
model's. Position j keeps what was made of the state of token j.
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
from banyan.models.decoder import DecoderLayer, DecoderLM
from banyan.parallel.groups import Group


class BlockLM(DecoderLM):
    """Satisfies `models.base.Model`; a step is blocks, whose tokens read each other."""

    def __init__(
        self, model_config: ModelConfig, family: Family, build: Build, served_length: int = 0
    ) -> None:
        super().__init__(model_config, family, build, served_length)
        assert model_config.eagle is not None
        del self.embedding, self.head
        self.facts, self.width = model_config.eagle, model_config.hidden_size
        outputs, rules = {"": model_config.hidden_size}, {"": ShardRule()}
        inputs = len(model_config.eagle.taps) * model_config.hidden_size
        self.join = ColumnLinear(inputs, outputs, rules, False, Group(), build)
        self.state_norm = RMSNorm(model_config.hidden_size, model_config.norm_eps, build)

    def borrow(self, model: DecoderLM) -> None:
        """Take the embedding and the head of the model that it drafts for."""
        assert isinstance(model.head, Logits)
        self.embedding, self.head = model.embedding, model.head

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the other model whose inputs it reads."""
        return self.facts.taps

    def take_in(self, states: Tensor) -> Tensor:
        """states: [n, taps · hidden_size]; returns what its layers know of them, [n, width]."""
        return self.state_norm(self.join(states))

    @property
    def reader(self) -> "StateReader":
        return StateReader(self)


class StateReader(nn.Module):
    """Satisfies `models.base.Model`: writes what a BlockLM keeps of the other model's tokens, whose
    states come as `StepInputs.carried`. It tells no tokens."""

    narrows = False

    def __init__(self, blocks: BlockLM) -> None:
        super().__init__()
        self.model_config = replace(blocks.model_config, pooling=Pooling())
        self.caches: list[LayerCache] = blocks.caches
        self._blocks = [blocks]  # not its own: no weights are its

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, hidden_size], the states."""
        (blocks,), states = self._blocks, step.carried
        assert states is not None, "the states are what is read"
        angles = {rope: rotary(step.positions) for rope, rotary in blocks.rotaries.items()}
        for module in blocks.layers:
            layer = cast(DecoderLayer, module)
            attention = cast(Attention, layer.attention)
            attention.keep(states, angles.get(layer.rope), step)
        return states

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("states tell no tokens")
