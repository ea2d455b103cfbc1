"""Mergers: what makes one feature row of merge x merge neighbouring patches.

Each takes the patches of each block together, [rows, merge², width], and returns [rows, out].
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, RowLinear, pack
from banyan.layers.mlp import GatedMLP
from banyan.layers.norm import LayerNorm, RMSNorm
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot, single
from banyan.model_config.media import TowerConfig
from banyan.ops.api import PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

_gelu = nn.functional.gelu


def norm_of(
    config: TowerConfig, build: Build, kind: str = "", width: int = 0
) -> RMSNorm | LayerNorm:
    """
    Args:
        kind: "" = the blocks' own.
        width: 0 = the tower's.
    """
    if (kind or config.norm) == "rms":
        return RMSNorm(width or config.width, config.eps, build)
    return LayerNorm(width or config.width, config.eps, True, build)


class TwoLinears(nn.Module):
    """linear_2(gelu(linear_1(x))), cut over the ranks in between."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, has_bias: bool, group: Group, build: Build
    ) -> None:
        super().__init__()
        rule = {"": ShardRule(0)}
        self.linear_1 = ColumnLinear(inputs, {"": inner}, rule, has_bias, group, build)
        self.linear_2 = RowLinear(inner, outputs, ShardRule(1), has_bias, group, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(_gelu(self.linear_1(x)))


class PatchMerger(nn.Module):
    """Qwen-VL: norm, concatenation, two projections of the concatenation's width.

    Args:
        is_norm_last: the norm follows the concatenation.
    """

    def __init__(
        self, config: TowerConfig, group: Group, build: Build, is_norm_last: bool = False
    ) -> None:
        super().__init__()
        wide = config.width * config.merge**2
        self.is_norm_last = is_norm_last
        own = replace(config, eps=config.merger_eps or config.eps)
        self.norm = norm_of(own, build, width=wide if is_norm_last else 0)
        self.mlp = TwoLinears(wide, wide, config.out, True, group, build)

    def forward(self, cells: Tensor) -> Tensor:
        if self.is_norm_last:
            return self.mlp(self.norm(cells.flatten(1)))
        return self.mlp(self.norm(cells.flatten(0, 1)).view(cells.shape).flatten(1))


class NormedProjector(nn.Module):
    """InternVL: concatenation, norm, two projections; LLaVA: the projections alone."""

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        wide = config.width * config.merge**2
        self.norm = LayerNorm(wide, 1e-5, True, build) if config.merge > 1 else None
        self.mlp = TwoLinears(wide, config.out, config.out, config.has_merger_bias, group, build)

    def forward(self, cells: Tensor) -> Tensor:
        x = cells.flatten(1)
        return self.mlp(x if self.norm is None else self.norm(x))


class Concatenation(nn.Module):
    """Idefics 3: concatenation and one projection. It is whole on every rank."""

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.linear = whole_linear(config.width * config.merge**2, config.out, build)

    def forward(self, cells: Tensor) -> Tensor:
        return self.linear(cells.flatten(1))


class MeanPooling(nn.Module):
    """Gemma 3: the mean of the patches, a norm and one projection. It is whole on every rank."""

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.eps, build)
        self.linear = InputsFirst(config.width, config.out, build)

    def forward(self, cells: Tensor) -> Tensor:
        return self.linear(self.norm(cells.mean(dim=1)))


class InputsFirst(Layer):
    """A projection that is stored as [in, out]."""

    def __init__(self, inputs: int, outputs: int, build: Build) -> None:
        super().__init__()
        self.shape = (inputs, outputs)
        self.ops = build.ops
        self.weight: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        turned = parts[0].dense.T.contiguous()
        self.weight = pack([StoredWeight.from_tensor(turned)], self.ops)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return self.weight(x)


class ReducingMerger(nn.Module):
    """Mistral 3: norm, one projection of the neighbours to the width of one, two projections.

    The neighbours of one channel lie together.
    """

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.merger_eps, build)
        self.reduce = whole_linear(config.width * config.merge**2, config.width, build)
        sizes = (config.width, config.out, config.out)
        self.mlp = TwoLinears(*sizes, config.has_merger_bias, group, build)

    def forward(self, cells: Tensor) -> Tensor:
        normed = self.norm(cells.flatten(0, 1)).view(cells.shape)
        return self.mlp(self.reduce(normed.transpose(1, 2).flatten(1)))


class Llama4Merger(nn.Module):
    """Llama 4: concatenation, two projections with an activation after each, and one to the text
    model's width."""

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        wide, inner = config.width * config.merge**2, config.merger_inner
        self.mlp = TwoLinears(wide, inner, inner, False, group, build)
        self.linear = whole_linear(inner, config.out, build)

    def forward(self, cells: Tensor) -> Tensor:
        return self.linear(_gelu(self.mlp(cells.flatten(1))))


class GatedMerger(nn.Module):
    """GLM-4V: a convolution over the neighbours, then a projection with norm and a gated block.

    The neighbours of one channel lie together.
    """

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.reduce = Downsampling(config, build)
        self.linear = whole_linear(config.out, config.out, build)
        self.norm = LayerNorm(config.out, 1e-5, True, build)
        inner, activation = config.merger_inner, config.activation
        self.mlp = GatedMLP(config.out, inner, activation, False, group, build)

    def forward(self, cells: Tensor) -> Tensor:
        x = self.reduce(cells.transpose(1, 2).flatten(1))
        return self.mlp(_gelu(self.norm(self.linear(x))))


class Downsampling(ColumnLinear):
    """A convolution whose stride is its kernel, as a projection of [channels, side, side]."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        inputs = config.width * config.merge**2
        super().__init__(inputs, {"": config.out}, {"": ShardRule()}, True, Group(), build)
        self.kernel = (config.out, config.width, config.merge, config.merge)

    def slots(self) -> dict[str, WeightSlot]:
        return super().slots() | {"weight": single(self.kernel)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        if slot == "weight":
            parts = [StoredWeight.from_tensor(parts[0].dense.flatten(1))]
        super().fill(slot, parts)


def whole_linear(inputs: int, outputs: int, build: Build) -> ColumnLinear:
    """A projection without bias that every rank holds."""
    return ColumnLinear(inputs, {"": outputs}, {"": ShardRule()}, False, Group(), build)


MERGERS: Mapping[str, Callable[[TowerConfig, Group, Build], nn.Module]] = {
    "qwen": PatchMerger,
    "projector": NormedProjector,
    "concatenation": Concatenation,
    "pooling": MeanPooling,
    "mistral3": ReducingMerger,
    "glm4v": GatedMerger,
    "llama4": Llama4Merger,
}
"""`TowerConfig.merger` -> class."""
