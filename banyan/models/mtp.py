"""MTPModel: a layer that a checkpoint brings for drafting (multi-token prediction: DeepSeek-V3,
arXiv 2412.19437, section 2.2).

It reads a token together with what the whole model made of the token before, and tells the token
after. Behind its own drafts it reads what it made itself. Embedding and head are the model's.
Position j holds the token j and the state of j − 1, so that position 0 holds nothing, and a page
depends on nothing behind it.
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
from banyan.models.decoder import DecoderLayer, DecoderLM
from banyan.parallel.groups import Group

FIRST = 1
"""The first position that holds anything."""
END = "end"
"""Name of what a page keeps of its last token."""


class PageEnds(Caching):
    """What the model made of the last token of each page: whoever finds a page in the cache begins
    behind it. The numbers of one token lie spread over the page."""

    def __init__(self, layer: int, width: int, page_size: int, build: Build) -> None:
        super().__init__()
        kept = CacheTensor((-(-width // page_size),), build.dtype, is_spread=True)
        self.cache = LayerCache(layer, {END: kept}, FULL)


class MTPLayer(DecoderLayer):
    """A block, what brings tokens and states together before it, and the norm behind it."""

    def __init__(self, model_config: ModelConfig, family: Family, build: Build) -> None:
        super().__init__(model_config, family, 0, build)
        size, eps = model_config.hidden_size, model_config.norm_eps
        self.token_norm = RMSNorm(size, eps, build)
        self.state_norm = RMSNorm(size, eps, build)
        outputs, rules = {"": size}, {"": ShardRule()}
        self.join = ColumnLinear(2 * size, outputs, rules, False, Group(), build)
        self.norm = RMSNorm(size, eps, build)
        assert family.ahead is not None
        self.has_states_first = family.ahead.has_states_first

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns the same of what comes behind the norm."""
        both = [self.token_norm(tokens), self.state_norm(states)]
        x = self.join(self.ops.concat(both[::-1] if self.has_states_first else both))
        return self.norm.add(*self(x, None, angles, step))[0]


class FollowingLM(nn.Module):
    """Satisfies `models.base.Model`; steps bring `StepInputs.carried`.

    Args:
        card: of the layers that draft.
        layers: by their names in the checkpoint.
        page_size: tokens of a page.
    """

    narrows = False

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
        self.ends = PageEnds(len(layers), self.width, page_size, build)
        self.caches: list[LayerCache] = caches_of(self)
        self.rotary: Rotary | None = None
        if self.model_config.rope.kind != "none":
            self.rotary = Rotary(
                *(
                    model_config.rotary_dim or model_config.head_dim,
                    model_config.rope,
                    model_config.context_length,
                ),
                *(served_length or model_config.context_length, build.ops, build.device),
            )
        self.ops, self.context = build.ops, build.groups.context
        self.embedding: Embedding | None = None
        self.head: Logits | None = None
        self.known: Tensor | None = None
        """[ids of its head], the id of each in the model's vocabulary; None = the same."""

    def borrow(self, model: DecoderLM) -> None:
        """Take the embedding and the head of the model that it drafts for."""
        assert isinstance(model.head, Logits)
        self.embedding, self.head = model.embedding, model.head

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model whose inputs it reads; () = the model's hidden states."""
        return ()

    def take_in(self, states: Tensor) -> Tensor:
        """[n, hidden_size], what it reads of the model's states: [n, hidden_size] for each tap, or
        one for the model's hidden states."""
        return states

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, hidden_size], what logits are made of and what it reads next, of all
        ranks that share the step's tokens."""
        assert self.embedding is not None and step.carried is not None
        angles = None if self.rotary is None else self.rotary(step.positions)
        read = self.read(self.embedding(step.tokens), step.carried, angles, step)
        return self.context.gather_rows(read)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """tokens, states: [tokens, hidden_size]; returns what the layers make of them, alike."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        assert self.head is not None, "it has not borrowed a head"
        logits = self.head(hidden)
        if self.known is None:
            return logits
        return self.ops.spread_columns(logits, self.known, self.model_config.vocab_size)


class MTPModel(FollowingLM):
    """
    Args:
        card: of the whole model.
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
