"""MTPModel: a checkpoint's multi-token prediction layer, used for drafting (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

It reads a token together with the model's hidden state of the token before and predicts the next
token. After its own drafts it reads its own hidden states. Embedding and head are the model's.
Position j holds token j and the state of j − 1. Position 0 therefore holds nothing, and a page does
not depend on later tokens.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from banyan.families.base import Family
from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor, Caching, LayerCache, caches_of
from banyan.layers.embedding import Embedding, Logits
from banyan.layers.linear import ColumnLinear
from banyan.layers.norm import RMSNorm
from banyan.layers.rotary import Angles, Rotary
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import FULL, ModelConfig
from banyan.models.base import NO_TOWERS
from banyan.models.decoder import DecoderLayer, DecoderLM
from banyan.parallel.groups import Group

FIRST = 1
"""The first position that holds anything."""
END = "end"
"""Name of a page's state of its last token."""


class PageEndCache(Caching):
    """The model's hidden state of the last token of each page. A request that continues after a
    cached page needs it. The state of one token is spread over the page."""

    def __init__(self, layer: int, width: int, page_size: int, build: Build) -> None:
        super().__init__()
        kept = CacheTensor((-(-width // page_size),), build.dtype, is_spread=True)
        self.cache = LayerCache(layer, {END: kept}, FULL)


class MTPLayer(DecoderLayer):
    """A block with the projection that joins tokens and states before it, and the norm after it."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        size, eps = model_config.hidden_size, model_config.norm_eps
        self.token_norm = RMSNorm(size, eps, build)
        self.state_norm = RMSNorm(size, eps, build)
        outputs, rules = {"": size}, {"": ShardRule()}
        self.join = ColumnLinear(2 * size, outputs, rules, False, Group(), build)
        self.norm = RMSNorm(size, eps, build)
        assert family.mtp is not None
        self.has_states_first = family.mtp.has_states_first

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns the output after the norm, same shape."""
        both = [self.token_norm(tokens), self.state_norm(states)]
        x = self.join(self.ops.concat(both[::-1] if self.has_states_first else both))
        return self.norm.add(*self(x, None, angles, step))[0]


class DraftLM(nn.Module):
    """Base of draft models that read hidden states of a target model from
    `StepInputs.previous_states`. Satisfies `models.base.Model`.

    Args:
        model_config: of the draft layers.
        layers: by their names in the checkpoint.
        page_size: tokens of a page.
    """

    prunes_to_outputs = False
    takes_features = False
    towers = NO_TOWERS

    def __init__(
        self,
        model_config: ModelConfig,
        layers: dict[str, nn.Module],
        build: Build,
        page_size: int,
        served_length: int = 0,
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.width = model_config.hidden_size
        self.layers = nn.ModuleDict(layers)
        self.ends = PageEndCache(len(layers), self.width, page_size, build)
        self.caches: list[LayerCache] = caches_of(self)
        self.rotary: Rotary | None = None
        if self.model_config.rope.kind != "none":
            self.rotary = Rotary(
                model_config.rotary_dim or model_config.head_dim,
                model_config.rope,
                model_config.context_length,
                served_length or model_config.context_length,
                build.ops,
                build.device,
                () if model_config.media is None else model_config.media.axes,
            )
        self.ops, self.context = build.ops, build.groups.context
        self.embedding: Embedding | None = None
        self.head: Logits | None = None
        self.vocabulary_ids: Tensor | None = None
        """[ids of its head], the id of each in the model's vocabulary; None = the same."""

    def share_embeddings(self, model: DecoderLM) -> None:
        """Use the target model's embedding and head."""
        assert isinstance(model.head, Logits)
        self.embedding, self.head = model.embedding, model.head

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target model whose inputs it reads; () = it reads the last hidden
        states."""
        return ()

    def project_states(self, states: Tensor) -> Tensor:
        """Project the target model's states, [n, hidden_size] or [n, aux layers · hidden_size], to
        [n, hidden_size]."""
        return states

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, hidden_size], what logits are made of and what it reads next, of all
        ranks that share the step's tokens."""
        assert self.embedding is not None and step.previous_states is not None
        angles = None if self.rotary is None else self.rotary(step.positions, step.shifts)
        read = self.read(self.embedding(step.tokens), step.previous_states, angles, step)
        return self.context.gather_rows(read)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns the output of the layers, same shape."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        assert self.head is not None, "share_embeddings was not called"
        logits = self.head(hidden)
        if self.vocabulary_ids is None:
            return logits
        return self.ops.spread_columns(logits, self.vocabulary_ids, self.model_config.vocab_size)


class MTPModel(DraftLM):
    """Args:
    model_config: of the whole model.
    name: number of the layer in the checkpoint.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        family: Family,
        name: str,
        build: Build,
        page_size: int,
        served_length: int = 0,
    ) -> None:
        experts = (
            None if model_config.experts is None else replace(model_config.experts, dense_layers=())
        )
        mine = replace(model_config, layer_kinds=(), experts=experts)
        layer = MTPLayer(mine, family, build)
        super().__init__(mine, {name: layer}, build, page_size, served_length)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        (layer,) = self.layers.values()
        return cast(MTPLayer, layer).read(tokens, states, angles, step)
