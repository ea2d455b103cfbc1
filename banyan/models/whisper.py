"""WhisperLM: the decoder of Whisper (arXiv 2212.04356), whose layers also read a sound.

A request has one content. The tower has made the keys and values of every layer of it, and each
row of a step attends to its own content (`StepInputs.cross`). Rows are few, so they take turns.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from banyan.base.errors import ConfigError, ModelError
from banyan.layers.attention import paged_cache
from banyan.layers.build import Build
from banyan.layers.cache_spec import LayerCache
from banyan.layers.embedding import Embedding, Logits
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.mlp import PlainMLP
from banyan.layers.norm import LayerNorm
from banyan.layers.step_inputs import AttentionSpec, CrossRow, StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.media import is_cross
from banyan.model_config.model_config import ModelConfig
from banyan.models.towers.vision import Tower
from banyan.ops.api import NotRecordable
from banyan.parallel.groups import Group


def _projection(size: int, has_bias: bool, build: Build) -> ColumnLinear:
    return ColumnLinear(size, {"": size}, {"": ShardRule()}, has_bias, Group(), build)


class DecoderAttention(nn.Module):
    """Attention over the tokens before. Keys have no bias."""

    def __init__(self, model_config: ModelConfig, layer: int, build: Build) -> None:
        super().__init__()
        size, heads, dim = model_config.hidden_size, model_config.num_heads, model_config.head_dim
        self.spec = AttentionSpec(layer, heads, heads, dim, dim**-0.5)
        self.cache = paged_cache(self.spec, build, heads)
        self.q = _projection(size, True, build)
        self.k = _projection(size, False, build)
        self.v = _projection(size, True, build)
        self.out = RowLinear(size, size, ShardRule(), True, Group(), build)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """x: [tokens, size]."""
        q, k, v = (
            each(x).unflatten(1, (-1, self.spec.head_dim)) for each in (self.q, self.k, self.v)
        )
        return self.out(step.attention(self.spec, q, k, v).flatten(1))


class CrossAttention(nn.Module):
    """Attention of each row over the content of its request."""

    def __init__(self, model_config: ModelConfig, layer: int, build: Build) -> None:
        super().__init__()
        size = model_config.hidden_size
        self.head_dim = model_config.head_dim
        self.first = 2 * layer * size
        self.size = size
        self.q = _projection(size, True, build)
        self.out = RowLinear(size, size, ShardRule(), True, Group(), build)

    def forward(self, x: Tensor, rows: Sequence[CrossRow]) -> Tensor:
        """x: [tokens, size]. Rows without a content read nothing."""
        q = self.q(x).unflatten(1, (-1, self.head_dim))
        found = torch.zeros_like(x)
        for row in rows:
            k, v = row.features[:, self.first : self.first + 2 * self.size].split(self.size, dim=1)
            k, v = (each.unflatten(1, (-1, self.head_dim)).transpose(0, 1) for each in (k, v))
            mine = q[row.first : row.end].transpose(0, 1)  # [heads, tokens, head_dim]
            read = scaled_dot_product_attention(mine.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
            found[row.first : row.end] = read[0].transpose(0, 1).flatten(1)
        return self.out(found)


class CrossLayer(nn.Module):
    def __init__(self, model_config: ModelConfig, layer: int, build: Build) -> None:
        super().__init__()
        size, eps = model_config.hidden_size, model_config.norm_eps
        self.attention_norm = LayerNorm(size, eps, True, build)
        self.attention = DecoderAttention(model_config, layer, build)
        self.cross_norm = LayerNorm(size, eps, True, build)
        self.cross = CrossAttention(model_config, layer, build)
        self.mlp_norm = LayerNorm(size, eps, True, build)
        inner, activation = model_config.intermediate_size, model_config.hidden_act
        self.mlp = PlainMLP(size, inner, activation, True, Group(), build)

    def forward(self, x: Tensor, step: StepInputs, rows: Sequence[CrossRow]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        x = x + self.cross(self.cross_norm(x), rows)
        return x + self.mlp(self.mlp_norm(x))


class WhisperLM(nn.Module):
    """Empty until `models.weights.loader` has filled it.

    Raises:
        ConfigError: several ranks.
        ModelError: it is served without its tower.
    """

    prunes_to_outputs = False
    takes_features = True

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        if not is_cross(model_config.media):
            raise ModelError(
                "the decoder of Whisper reads nothing but sound",
                hint="leave out --language-model-only",
            )
        if build.groups.world.size > 1:
            raise ConfigError("Whisper runs on one rank", hint="use --tp 1, and --dp for more")
        self.model_config = model_config
        self.dtype = build.dtype
        self.stage = range(model_config.num_layers)
        size, eps = model_config.hidden_size, model_config.norm_eps
        self.tower_modules = nn.ModuleDict()
        self.embedding = Embedding(model_config.vocab_size, size, build)
        self.positions = Embedding(model_config.context_length, size, build)
        layers = [CrossLayer(model_config, layer, build) for layer in self.stage]
        self.layers = nn.ModuleList(layers)
        self.caches: list[LayerCache] = [layer.attention.cache for layer in layers]
        self.norm = LayerNorm(size, eps, True, build)
        self.head = Logits(model_config.vocab_size, size, build)

    @property
    def towers(self) -> Mapping[str, Tower]:
        """See `Model`."""
        return {kind: cast(Tower, module) for kind, module in self.tower_modules.items()}

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, [tokens, hidden_size]."""
        if step.cross is None:
            raise NotRecordable("each row attends to its own content")
        x = self.embedding(step.tokens) + self.positions(step.positions)
        for layer in self.layers:
            x = layer(x, step, step.cross)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32."""
        return self.head(hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled
