"""SoundTower: the encoder of a model that takes sound, from mel spectrograms to feature rows.

Whisper's encoder (arXiv 2212.04356), which Qwen2-Audio (arXiv 2407.10759) and Voxtral
(arXiv 2507.13264) have too: two convolutions, learned positions, transformer blocks. It is walked
in pieces, as `VisionTower` is. The windows of a sound are a batch; they do not see each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, conv1d, gelu, scaled_dot_product_attention

from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.mlp import PlainMLP
from banyan.layers.norm import LayerNorm
from banyan.layers.weight_slot import Layer, ShardRule, WeightSlot, single
from banyan.model_config.media import SoundTowerConfig
from banyan.model_config.model_config import ModelConfig
from banyan.models.towers.mergers import TwoLinears
from banyan.models.towers.vision import Grid
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

_EPS = 1e-5


@dataclass
class SoundState:
    """One sound on its way through the tower.

    Attributes:
        windows: how many there are.
        x: hidden states, [windows · states, width].
    """

    windows: int
    x: Tensor


class Convolution(Layer):
    """A convolution over time with a kernel of three frames."""

    def __init__(self, inputs: int, outputs: int, stride: int, build: Build) -> None:
        super().__init__()
        self.shape = (outputs, inputs, 3)
        self.stride = stride
        self.weight = self.bias = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape), "bias": single(self.shape[:1])}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        values = parts[0].dense.to(self.weight.dtype).to(self.weight.device)
        if slot == "weight":
            self.weight = values
        else:
            self.bias = values

    def forward(self, x: Tensor) -> Tensor:
        """x: [windows, inputs, frames]; returns [windows, outputs, frames / stride]."""
        return gelu(conv1d(x, self.weight, self.bias, stride=self.stride, padding=1))


class FramePositions(Layer):
    """The position of each state in its window."""

    def __init__(self, config: SoundTowerConfig, build: Build) -> None:
        super().__init__()
        self.shape = (config.window // 2, config.width)
        self.table = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.table = parts[0].dense.to(self.table)


class FrameAttention(nn.Module):
    """Attention in both directions within a window. Keys have no bias."""

    def __init__(self, config: SoundTowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        rule = {"": ShardRule(0, self.head_dim)}
        sizes = (config.width, {"": config.width}, rule)
        self.q = ColumnLinear(*sizes, True, group, build)
        self.k = ColumnLinear(*sizes, False, group, build)
        self.v = ColumnLinear(*sizes, True, group, build)
        out_rule = ShardRule(1, self.head_dim)
        self.out = RowLinear(config.width, config.width, out_rule, True, group, build)

    def forward(self, x: Tensor, windows: int) -> Tensor:
        """x: [windows · states, width]."""
        q, k, v = (
            each(x).unflatten(0, (windows, -1)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        found = scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2).flatten(0, 1))


class FrameBlock(nn.Module):
    def __init__(self, config: SoundTowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width, _EPS, True, build)
        self.attention = FrameAttention(config, group, build)
        self.mlp_norm = LayerNorm(config.width, _EPS, True, build)
        sizes = (config.width, config.inner, config.activation, True)
        self.mlp = PlainMLP(*sizes, group, build)

    def forward(self, x: Tensor, windows: int) -> Tensor:
        """x: [windows · states, width]."""
        x = x + self.attention(self.attention_norm(x), windows)
        return x + self.mlp(self.mlp_norm(x))


class OneLinear(nn.Module):
    """Qwen2-Audio: one projection of each state. It is whole on every rank."""

    def __init__(self, config: SoundTowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        rule, sizes = {"": ShardRule()}, (config.width * config.stack, {"": config.out})
        self.linear = ColumnLinear(*sizes, rule, config.has_merger_bias, Group(), build)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ProjectedStates(nn.Module):
    """Voxtral: two projections of neighbouring states together."""

    def __init__(self, config: SoundTowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        wide, has_bias = config.width * config.stack, config.has_merger_bias
        self.mlp = TwoLinears(wide, config.out, config.out, has_bias, group, build)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class CrossKeys(nn.Module):
    """Whisper: keys and values of every decoder layer, so that no step computes them again.

    A row is [layers, (k, v), width], flat. It is whole on every rank.
    """

    def __init__(self, config: SoundTowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        rule, sizes = {"": ShardRule()}, (config.width, {"": config.out // (2 * config.layers)})
        self.k = nn.ModuleList(
            ColumnLinear(*sizes, rule, False, Group(), build) for _ in range(config.layers)
        )
        self.v = nn.ModuleList(
            ColumnLinear(*sizes, rule, True, Group(), build) for _ in range(config.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.k, self.v, strict=True)
        return torch.cat([part(x) for pair in pairs for part in pair], dim=1)


_MERGERS: Mapping[str, Callable[[SoundTowerConfig, Group, Build], nn.Module]] = {
    "linear": OneLinear,
    "mlp": ProjectedStates,
    "cross": CrossKeys,
}
"""`SoundTowerConfig.merger` -> class."""


class SoundTower(nn.Module):
    """See `Tower`. Empty until `models.weights.loader` has filled it."""

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        assert model_config.media is not None and model_config.media.sound is not None
        self.model_config = model_config
        self.config = config = model_config.media.sound.tower
        self.dtype, self.device = build.dtype, build.device
        self.blocks, self.width = config.blocks, config.out
        group = build.groups.attention
        parts = (config.heads, config.inner, config.out)
        is_cut = not group.gathers and all(part % group.size == 0 for part in parts)
        group = group if is_cut else Group()
        self.conv_1 = Convolution(config.bands, config.width, 1, build)
        self.conv_2 = Convolution(config.width, config.width, 2, build)
        self.positions = FramePositions(config, build)
        self.layers = nn.ModuleList(FrameBlock(config, group, build) for _ in range(config.blocks))
        self.last_norm = LayerNorm(config.width, _EPS, True, build)
        self.merger = _MERGERS[config.merger](config, group, build)

    def begin(self, content: Tensor, grid: Grid) -> SoundState:
        """content: fp32 [windows, bands, frames]; of each, `grid[2]` frames have sound. Frames
        after those are the silence that the convolutions see."""
        windows, _, frames = grid
        x = self.conv_2(self.conv_1(content.to(self.device, self.dtype)))
        x = x[:, :, : (frames + 1) // 2].transpose(1, 2)
        return SoundState(
            windows, (x + self.positions.table[: x.shape[1]]).flatten(0, 1).contiguous()
        )

    def run(self, state: SoundState, first_block: int, blocks: int) -> None:
        """See `Tower`."""
        for at in range(first_block, first_block + blocks):
            state.x = self.layers[at](state.x, state.windows)

    def end(self, state: SoundState) -> Tensor:
        """See `Tower`."""
        config = self.config
        x = state.x.unflatten(0, (state.windows, -1))
        if config.pool > 1:
            x = avg_pool1d(x.transpose(1, 2), config.pool).transpose(1, 2)
        x = self.last_norm(x.flatten(0, 1).contiguous())
        if config.stack > 1:
            x = x.unflatten(0, (state.windows, -1))
            x = x[:, : x.shape[1] // config.stack * config.stack]
            x = x.reshape(-1, config.stack * config.width)
        return self.merger(x)
