"""Draft models that were trained for one target model.

EagleLM (EAGLE, arXiv 2401.15077): a projection joins each token with the target model's hidden
state of the token before; a few Llama blocks predict the next hidden state, which the target's head
reads. Eagle3LM (EAGLE-3, arXiv 2503.01840): a projection joins the inputs of three target layers;
one block reads the result together with the token, and the model's own head predicts frequent
tokens.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from banyan.families.base import Family
from banyan.layers.attention import Attention
from banyan.layers.build import Build
from banyan.layers.embedding import Logits
from banyan.layers.linear import ColumnLinear
from banyan.layers.norm import ResidualSum, RMSNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import ModelConfig
from banyan.models.decoder import DecoderLayer, DecoderLM, attention_shape
from banyan.models.mtp import DraftLM
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


class EagleLayer(DecoderLayer):
    """A first block without an input norm."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        del self.attention_norm
        self.attention_norm = ResidualSum(build.ops)


class EagleLM(DraftLM):
    """Args:
    has_bias: the projection has one.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        family: Family,
        build: Build,
        page_size: int,
        has_bias: bool,
        served_length: int = 0,
    ) -> None:
        layers: dict[str, nn.Module] = {"0": EagleLayer(model_config, family, build)}
        for layer in range(1, model_config.num_layers):
            layers[str(layer)] = DecoderLayer(model_config, family, layer, build)
        super().__init__(model_config, layers, build, page_size, served_length)
        outputs, rules = {"": model_config.hidden_size}, {"": ShardRule()}
        self.join = ColumnLinear(
            2 * model_config.hidden_size, outputs, rules, has_bias, Group(), build
        )

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        x, residual = self.join(self.ops.concat([tokens, states])), None
        for layer in self.layers.values():
            x, residual = layer(x, residual, angles, step)
        return x if residual is None else self.ops.add(x, residual)

    def restrict_vocabulary(self, tokens: Tensor, rows: StoredWeight, build: Build) -> None:
        """Draft only some tokens.

        tokens: [n] int64 ids; rows: [n, hidden_size], their rows of the target model's head.
        """
        whole = self.head
        assert whole is not None and not whole.has_bias and not whole.is_normed
        scales = (whole.scale, whole.soft_cap)
        self.head, self.vocabulary_ids = Logits(len(tokens), self.width, build, *scales), tokens
        self.head.fill("weight", [rows])


class Eagle3Layer(DecoderLayer):
    """A block whose attention reads a token and a state, concatenated; the state is the residual
    stream."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        size = model_config.hidden_size
        shape = replace(attention_shape(model_config, family, 0), reads=2 * size)
        self.attention = Attention(shape, build)
        self.state_norm = RMSNorm(size, model_config.norm_eps, build)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns the stream after the block, same shape."""
        assert self.mlp is not None and self.mlp_norm is not None
        both = [self.attention_norm.add(tokens, None)[0], self.state_norm(states)]
        attended = self.attention(self.ops.concat(both), angles, step)
        x, residual = self.mlp_norm.add(attended, states)
        return self.ops.add(self.mlp(x), residual)


class Eagle3LM(DraftLM):
    """Args:
    has_bias: the projection has one.
    has_head: it has its own head; otherwise it uses the target model's.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        family: Family,
        build: Build,
        page_size: int,
        has_bias: bool,
        has_head: bool,
        served_length: int = 0,
    ) -> None:
        assert model_config.draft_fields is not None
        layers: dict[str, nn.Module] = {"0": Eagle3Layer(model_config, family, build)}
        super().__init__(model_config, layers, build, page_size, served_length)
        self.facts = model_config.draft_fields
        inputs = len(model_config.draft_fields.aux_layers) * model_config.hidden_size
        outputs, rules = {"": model_config.hidden_size}, {"": ShardRule()}
        self.join = ColumnLinear(inputs, outputs, rules, has_bias, Group(), build)
        self.norm = RMSNorm(model_config.hidden_size, model_config.norm_eps, build)
        if has_head:
            self.head = Logits(
                model_config.draft_fields.num_tokens, model_config.hidden_size, build
            )
        if model_config.draft_fields.num_tokens < model_config.vocab_size:
            self.vocabulary_ids = torch.arange(
                model_config.draft_fields.num_tokens, device=build.device
            )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.facts.aux_layers

    def share_embeddings(self, model: DecoderLM) -> None:
        mine = self.head
        super().share_embeddings(model)
        self.head = mine or self.head

    def project_states(self, states: Tensor) -> Tensor:
        return self.join(states)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        (layer,) = self.layers.values()
        return cast(Eagle3Layer, layer).read(tokens, states, angles, step)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))
