"""EncoderLM: BERT (arXiv 1810.04805) and RoBERTa / XLM-R, which differ in names and positions.

A prompt is read at once and every token sees every other. The runner pools the hidden states. With
classes, the first token's state goes through a dense layer with tanh and an output projection.
"""

import torch
from torch import Tensor, nn

from banyan.layers.attention import Attention, AttentionShape
from banyan.layers.build import Build
from banyan.layers.cache_spec import LayerCache
from banyan.layers.embedding import Embedding
from banyan.layers.linear import ColumnLinear
from banyan.layers.mlp import PlainMLP
from banyan.layers.norm import LayerNorm
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import NO_TOWERS
from banyan.parallel.groups import Group


class EncoderLayer(nn.Module):
    """A block with norms after attention and feed-forward, on the sum with the input."""

    def __init__(self, model_config: ModelConfig, layer: int, build: Build) -> None:
        super().__init__()
        size, eps = model_config.hidden_size, model_config.norm_eps
        shape = AttentionShape(
            layer=layer,
            dim=size,
            heads=model_config.num_heads,
            kv_heads=model_config.num_heads,
            head_dim=model_config.head_dim,
            scale=model_config.head_dim**-0.5,
            has_bias=True,
            has_output_bias=True,
        )
        self.attention = Attention(shape, build)
        self.attention_norm = LayerNorm(size, eps, True, build)
        inner, activation = model_config.intermediate_size, model_config.hidden_act
        self.mlp = PlainMLP(size, inner, activation, True, build.groups.ffn, build)
        self.mlp_norm = LayerNorm(size, eps, True, build)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        x, _ = self.attention_norm.add(self.attention(x, None, step), x)
        return self.mlp_norm.add(self.mlp(x), x)[0]


class ClassHead(nn.Module):
    """out(tanh(dense(x))): class scores, replicated on every rank."""

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()

        def whole(width: int) -> ColumnLinear:
            rule = {"": ShardRule()}
            size = model_config.hidden_size
            return ColumnLinear(size, {"": width}, rule, True, Group(), build)

        self.dense = whole(model_config.hidden_size)
        self.out = whole(len(model_config.labels))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(x)))


class EncoderLM(nn.Module):
    """One rank's part of an encoder. Empty until `models.weights.loader` has filled it."""

    prunes_to_outputs = False
    takes_features = False
    towers = NO_TOWERS

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.model_config = model_config
        self.dtype = build.dtype
        self.stage = range(model_config.num_layers)
        self.caches: list[LayerCache] = []  # whole prompts: nothing is kept
        size = model_config.hidden_size
        num_positions = model_config.context_length + model_config.first_position
        self.embedding = Embedding(model_config.vocab_size, size, build)
        self.positions = Embedding(num_positions, size, build)
        self.segments = Embedding(model_config.num_segments, size, build)
        self.norm = LayerNorm(size, model_config.norm_eps, True, build)
        self.layers = nn.ModuleList(
            EncoderLayer(model_config, layer, build) for layer in range(model_config.num_layers)
        )
        self.head = ClassHead(model_config, build) if model_config.labels else None

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states of the last block, [tokens, hidden_size]."""
        x = self.embedding(step.tokens) + self.positions(
            step.positions + self.model_config.first_position
        )
        x = self.norm(x + self.segments(self._segments_of(step)))
        for layer in self.layers:
            x = layer(x, step)
        return x

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled: [n, hidden_size]; returns scores [n, classes], or `pooled` if there are no
        classes."""
        return pooled if self.head is None else self.head(pooled)

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("an encoder has no next token")

    def _segments_of(self, step: StepInputs) -> Tensor:
        """Segment of each token, [tokens]: 1 after the first separator of its row, else 0.

        A prompt starts at position 0, so counts restart there.
        """
        if self.model_config.separator_id < 0:
            return torch.zeros_like(step.tokens)
        before = (step.tokens == self.model_config.separator_id).long().cumsum(0)
        before = torch.cat([before.new_zeros(1), before[:-1]])
        first = torch.arange(len(before), device=before.device) - step.positions
        return (before > before[first]).long()
