"""Models that were trained to draft for another one.

EagleLM (EAGLE, arXiv 2401.15077): a projection brings each token together with the other model's
state of the token before, and one or a few of Llama's blocks tell the next state from it: what the
other model's head would read. Eagle3LM (EAGLE-3, arXiv 2503.01840): a projection makes a state of
what came to three layers of the other model, one block reads that beside the token, and a head of
its own tells the next token, of those that are frequent.
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
from banyan.layers.norm import RMSNorm, Sum
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import ModelConfig
from banyan.models.decoder import DecoderLayer, DecoderLM, attention_shape
from banyan.models.mtp import FollowingLM
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


class FirstLayer(DecoderLayer):
    """A block that reads the stream as it is."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        del self.attention_norm
        self.attention_norm = Sum(build.ops)


class EagleLM(FollowingLM):
    """
    Args:
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
        layers: dict[str, nn.Module] = {"0": FirstLayer(model_config, family, build)}
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

    def know(self, tokens: Tensor, rows: StoredWeight, build: Build) -> None:
        """Draft some tokens only.

        tokens: [n] int64 ids; rows: [n, hidden_size], theirs of the other model's head.
        """
        whole = self.head
        assert whole is not None and not whole.has_bias and not whole.is_normed
        scales = (whole.scale, whole.soft_cap)
        self.head, self.known = Logits(len(tokens), self.width, build, *scales), tokens
        self.head.fill("weight", [rows])


class TwofoldLayer(DecoderLayer):
    """A block whose attention reads a token and a state side by side; the state is the stream."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        size = model_config.hidden_size
        shape = replace(attention_shape(model_config, family, 0), reads=2 * size)
        self.attention = Attention(shape, build)
        self.state_norm = RMSNorm(size, model_config.norm_eps, build)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns the stream behind the block, alike."""
        assert self.mlp is not None and self.mlp_norm is not None
        both = [self.attention_norm.add(tokens, None)[0], self.state_norm(states)]
        attended = self.attention(self.ops.concat(both), angles, step)
        x, residual = self.mlp_norm.add(attended, states)
        return self.ops.add(self.mlp(x), residual)


class Eagle3LM(FollowingLM):
    """
    Args:
        has_bias: the projection has one.
        has_head: it brings a head of its own; else that of the model which it drafts for is meant.
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
        assert model_config.eagle is not None
        layers: dict[str, nn.Module] = {"0": TwofoldLayer(model_config, family, build)}
        super().__init__(model_config, layers, build, page_size, served_length)
        self.facts = model_config.eagle
        inputs = len(model_config.eagle.taps) * model_config.hidden_size
        outputs, rules = {"": model_config.hidden_size}, {"": ShardRule()}
        self.join = ColumnLinear(inputs, outputs, rules, has_bias, Group(), build)
        self.norm = RMSNorm(model_config.hidden_size, model_config.norm_eps, build)
        if has_head:
            self.head = Logits(model_config.eagle.num_tokens, model_config.hidden_size, build)
        if model_config.eagle.num_tokens < model_config.vocab_size:
            self.known = torch.arange(model_config.eagle.num_tokens, device=build.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.facts.taps

    def borrow(self, model: DecoderLM) -> None:
        mine = self.head
        super().borrow(model)
        self.head = mine or self.head

    def take_in(self, states: Tensor) -> Tensor:
        return self.join(states)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        (layer,) = self.layers.values()
        return cast(TwofoldLayer, layer).read(tokens, states, angles, step)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))
