"""EagleLM: a model that was trained to draft for another one (EAGLE, arXiv 2401.15077).

A projection brings each token together with the other model's state of the token before, and one or
a few of Llama's blocks tell the next state from it: what the other model's head would read.
"""

from torch import Tensor, nn

from banyan.config.card import ModelCard
from banyan.families.base import Family
from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear
from banyan.layers.norm import Sum
from banyan.layers.rotary import Angles
from banyan.layers.slot import ShardRule
from banyan.layers.step import StepInputs
from banyan.models.ahead import FollowingLM
from banyan.models.decoder import DecoderLayer
from banyan.parallel.groups import Group


class FirstLayer(DecoderLayer):
    """A block that reads the stream as it is."""

    def __init__(self, card: ModelCard, family: Family, build: Build) -> None:
        super().__init__(card, family, 0, build)
        del self.attention_norm
        self.attention_norm = Sum(build.ops)


class EagleLM(FollowingLM):
    """
    Args:
        has_bias: the projection has one.
    """

    def __init__(
        self,
        card: ModelCard,
        family: Family,
        build: Build,
        page_size: int,
        has_bias: bool,
        served_length: int = 0,
    ) -> None:
        layers: dict[str, nn.Module] = {"0": FirstLayer(card, family, build)}
        for layer in range(1, card.num_layers):
            layers[str(layer)] = DecoderLayer(card, family, layer, build)
        super().__init__(card, layers, build, page_size, served_length)
        self.ops = build.ops
        outputs, rules = {"": card.hidden_size}, {"": ShardRule()}
        self.join = ColumnLinear(2 * card.hidden_size, outputs, rules, has_bias, Group(), build)

    def read(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        x, residual = self.join(self.ops.concat([tokens, states])), None
        for layer in self.layers.values():
            x, residual = layer(x, residual, angles, step)
        return x if residual is None else self.ops.add(x, residual)
