"""VisionTower: the encoder of a multimodal model, from patches of pixels to feature rows.

It is walked in pieces of blocks, `begin`, `run` … `run`, `end`, so that a picture never holds up
the answers of others for longer than one piece. An item is walked alone: its features depend on
nothing else, and pieces compute what the whole does.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, RowLinear, pack
from banyan.layers.mlp import GatedMLP, PlainMLP
from banyan.layers.norm import LayerNorm, RMSNorm
from banyan.layers.rotary import Angles
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot, single
from banyan.model_config.media import TowerConfig
from banyan.model_config.model_config import ModelConfig
from banyan.models.towers.patch_grid import Grid, Segments, coordinates, interpolation, windows
from banyan.ops.api import PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

_BYTE = 255.0


@dataclass
class TowerState:
    """One item on its way through a tower.

    Attributes:
        grid: (t, h, w) in patches.
        x: hidden states, [patches, width].
        angles: cos and sin of the rotation, [patches, pairs]; None = none.
        whole, inside: what a full block and what a window block sees.
        order: of the feature rows while windows are together; None = their own order.
        deep: DeepStack parts so far, each [rows, out].
    """

    grid: Grid
    x: Tensor
    angles: Angles | None
    whole: Segments
    inside: Segments
    order: Tensor | None = None
    deep: list[Tensor] = field(default_factory=list[Tensor])


class Tower(Protocol):
    """Attributes:
    blocks: number of transformer blocks.
    width: of one feature row, with its DeepStack parts.
    """

    blocks: int
    width: int

    def begin(self, content: Tensor, grid: Grid) -> TowerState:
        """content: uint8 [patches, values of a patch], in the order of `patch_grid`."""
        ...

    def run(self, state: TowerState, first_block: int, blocks: int) -> None:
        """Run some blocks; the first is the one after the last that was run."""
        ...

    def end(self, state: TowerState) -> Tensor:
        """After all blocks; returns the feature rows, [rows, width]."""
        ...

    def cost(self, grid: Grid) -> int:
        """Multiply-adds of one block, the mean over all blocks."""
        ...


class Patches(Layer):
    """Projects patches of pixels: a convolution whose stride is its kernel."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        super().__init__()
        frames = (config.temporal_patch,) if config.temporal_patch > 1 else ()
        self.shape = (config.width, config.channels, *frames, config.patch, config.patch)
        self.has_bias = config.has_patch_bias
        self.ops = build.ops
        self.weight: PackedLinear | None = None
        self.bias: Tensor | None = None
        self._like = torch.empty(0, dtype=build.dtype, device=build.device)
        each = config.temporal_patch * config.patch**2
        mean, std = (torch.tensor(v).repeat_interleave(each) for v in (config.mean, config.std))
        self.scale = (1 / (_BYTE * std)).to(build.device)  # [values of a patch]
        self.shift = (-mean / std).to(build.device)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": single(self.shape)}
        return slots | ({"bias": single(self.shape[:1])} if self.has_bias else {})

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        if slot == "weight":
            matrix = parts[0].dense.to(self._like).flatten(1)
            self.weight = pack([StoredWeight.from_tensor(matrix.cpu())], self.ops)
        else:
            self.bias = parts[0].dense.to(self._like)

    def forward(self, content: Tensor) -> Tensor:
        """content: uint8 [patches, values]; returns [patches, width]."""
        assert self.weight is not None
        values = torch.addcmul(self.shift, content.float(), self.scale)
        return self.weight(values.to(self._like.dtype), self.bias)


class LearnedPositions(Layer):
    """A learned table of side² positions that is interpolated to each grid."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        super().__init__()
        self.shape = (config.side**2, config.width)
        self.table = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.table = parts[0].dense.to(self.table)

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows: int64, weights: fp32, both [patches, taps]; returns [patches, width]."""
        table = self.table
        total = torch.zeros(len(rows), self.shape[1], dtype=torch.float32, device=table.device)
        for tap in range(rows.shape[1]):
            total.addcmul_(table[rows[:, tap]].float(), weights[:, tap : tap + 1])
        return total.to(table.dtype)


class TowerAttention(nn.Module):
    """Attention in both directions within segments of patches."""

    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        width = config.width
        self.head_dim = width // config.heads
        rule = ShardRule(0, self.head_dim)
        first, last = rule.span(width, group)
        self.mine = last - first
        turning = RotaryRows(self.head_dim, 0, self.head_dim)
        self.qkv = ColumnLinear(
            width,
            dict.fromkeys("qkv", width),
            dict.fromkeys("qkv", rule),
            True,
            group,
            build,
            turning={"q": turning, "k": turning},
        )
        self.out = RowLinear(width, width, ShardRule(1, self.head_dim), True, group, build)
        self.ops = build.ops

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """x: [patches, width]."""
        heads = (-1, self.head_dim)
        q, k, v = (each.unflatten(1, heads) for each in self.qkv(x).split(self.mine, dim=1))
        if angles is not None:
            q, k = self.ops.rotary(q, k, *angles)
        return self.out(attend(q, k, v, segments).flatten(1))


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """softmax(q·kᵀ / sqrt(head_dim))·v within each segment. All are [patches, heads, head_dim].

    Segments of one length are one batch; no mask is made, so memory grows with the patches alone.
    """
    out = torch.empty_like(v)
    for length, places in segments.groups:
        if places is None:
            return _batch(q, k, v, length).reshape(q.shape)
        out[places] = _batch(q[places], k[places], v[places], length).reshape(-1, *q.shape[1:])
    return out


def _batch(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """returns: [segments, length, heads, head_dim]."""
    q, k, v = (each.unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


class TowerBlock(nn.Module):
    def __init__(self, config: TowerConfig, group: Group, build: Build) -> None:
        super().__init__()
        self.attention_norm = norm_of(config, build)
        self.attention = TowerAttention(config, group, build)
        self.mlp_norm = norm_of(config, build)
        kind = GatedMLP if config.mlp == "gated" else PlainMLP
        self.mlp = kind(config.width, config.inner, config.activation, True, group, build)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """x: [patches, width]."""
        x = x + self.attention(self.attention_norm(x), angles, segments)
        return x + self.mlp(self.mlp_norm(x))


def norm_of(config: TowerConfig, build: Build, width: int = 0) -> RMSNorm | LayerNorm:
    if config.norm == "rms":
        return RMSNorm(width or config.width, config.eps, build)
    return LayerNorm(width or config.width, config.eps, True, build)


class PatchMerger(nn.Module):
    """Makes one feature row of merge x merge neighbours: norm, concatenation, two projections.

    Args:
        is_norm_last: the norm follows the concatenation.
    """

    def __init__(
        self, config: TowerConfig, group: Group, build: Build, is_norm_last: bool = False
    ) -> None:
        super().__init__()
        self.wide = wide = config.width * config.merge**2
        self.is_norm_last = is_norm_last
        self.norm = norm_of(config, build, wide if is_norm_last else config.width)
        self.linear_0 = ColumnLinear(wide, {"": wide}, {"": ShardRule(0)}, True, group, build)
        self.linear_2 = RowLinear(wide, config.out, ShardRule(1), True, group, build)

    def forward(self, x: Tensor) -> Tensor:
        """x: [patches, width]; returns [rows, out]."""
        x = self.norm(x.view(-1, self.wide)) if self.is_norm_last else self.norm(x)
        x = self.linear_0(x.reshape(-1, self.wide))
        return self.linear_2(nn.functional.gelu(x))


class VisionTower(nn.Module):
    """See `Tower`. Empty until `models.weights.loader` has filled it."""

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        assert model_config.media is not None
        self.model_config = model_config
        self.config = config = model_config.media.tower
        self.dtype, self.device = build.dtype, build.device
        self.blocks, self.width = config.blocks, config.feature_width
        group = self._group_of(config, build)
        self.patches = Patches(config, build)
        self.positions = LearnedPositions(config, build) if config.positions else None
        self.layers = nn.ModuleList(TowerBlock(config, group, build) for _ in range(config.blocks))
        self.merger = PatchMerger(config, group, build)
        self.deep = nn.ModuleList(
            PatchMerger(config, group, build, is_norm_last=True) for _ in config.deep_blocks
        )
        pairs = config.width // config.heads // 4  # of each axis
        self.frequencies = config.rope_theta ** -(torch.arange(pairs) / pairs).to(build.device)

    @staticmethod
    def _group_of(config: TowerConfig, build: Build) -> Group:
        """The ranks that share the heads; with rows of their own each rank has the whole tower."""
        group = build.groups.attention
        parts = (config.heads, config.inner, config.width * config.merge**2)
        is_cut = not group.gathers and all(part % group.size == 0 for part in parts)
        return group if is_cut else Group()

    def begin(self, content: Tensor, grid: Grid) -> TowerState:
        """See `Tower`."""
        config = self.config
        x = self.patches(content.to(self.device))
        if self.positions is not None:
            rows, weights = interpolation(grid, config.merge, config.side, config.positions, True)
            x = x + self.positions(rows.to(self.device), weights.to(self.device))
        angles = self._angles(grid) if config.rope_theta else None
        whole = inside = Segments.of([grid[1] * grid[2]] * grid[0], self.device)
        order = None
        if config.window:
            order, lengths = windows(grid, config.merge, config.window)
            order, inside = order.to(self.device), Segments.of(lengths, self.device)
            x = self._by_window(x, order)
            if angles is not None:
                angles = (self._by_window(angles[0], order), self._by_window(angles[1], order))
        return TowerState(grid, x, angles, whole, inside, order)

    def run(self, state: TowerState, first_block: int, blocks: int) -> None:
        """See `Tower`."""
        config = self.config
        for at in range(first_block, first_block + blocks):
            is_full = not config.window or at in config.full_blocks
            segments = state.whole if is_full else state.inside
            state.x = self.layers[at](state.x, state.angles, segments)
            if at in config.deep_blocks:
                merger = self.deep[config.deep_blocks.index(at)]
                state.deep.append(self._in_order(merger(state.x), state.order))

    def end(self, state: TowerState) -> Tensor:
        """See `Tower`."""
        rows = self._in_order(self.merger(state.x), state.order)
        return torch.cat([rows, *state.deep], dim=1)

    def cost(self, grid: Grid) -> int:
        """See `Tower`."""
        config = self.config
        frames, height, width = grid
        patches = frames * height * width
        matrices = 3 if config.mlp == "gated" else 2
        linear = config.width * (4 * config.width + matrices * config.inner)
        whole, inside = (2 * config.width * pairs for pairs in self._pairs(grid))
        full = len(config.full_blocks) if config.window else config.blocks
        seen = (whole * full + inside * (config.blocks - full)) // config.blocks
        return patches * linear + seen

    def _pairs(self, grid: Grid) -> tuple[int, int]:
        """Pairs of patches that attend in a full block and in a window block."""
        frames, height, width = grid
        whole = frames * (height * width) ** 2
        side = self.config.window * self.config.merge
        return whole, min(whole, frames * height * width * side * side)

    def _angles(self, grid: Grid) -> Angles:
        """Half of a head's pairs turn by the row, half by the column."""
        axes = coordinates(grid, self.config.merge)
        turns = torch.cat(
            [axis.to(self.device).unsqueeze(1) * self.frequencies for axis in axes], dim=1
        )
        return turns.cos(), turns.sin()

    def _by_window(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of patches [patches, …] in the order of windows."""
        cells = x.unflatten(0, (-1, self.config.merge**2))
        return cells[order].flatten(0, 1)

    @staticmethod
    def _in_order(rows: Tensor, order: Tensor | None) -> Tensor:
        """Feature rows [rows, out] in their own order again."""
        if order is None:
            return rows
        out = torch.empty_like(rows)
        out[order] = rows
        return out
