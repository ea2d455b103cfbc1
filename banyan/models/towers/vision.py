"""VisionTower: the encoder of a multimodal model, from patches of pixels to feature rows.

It is walked in pieces of blocks, `begin`, `run` … `run`, `end`, so that a picture never holds up
the answers of others for longer than one piece. An item is walked alone: its features depend on
nothing else, and pieces compute what the whole does.

A grid is (t, h, w) in patches. Patches come frame by frame; within a frame the merge x merge
neighbours that become one feature row come together, row by row of such blocks. With merge 1 that
is the order of rows.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear, RowLinear, pack
from banyan.layers.mlp import GatedMLP, PlainMLP
from banyan.layers.norm import SpreadNorm
from banyan.layers.rotary import Angles
from banyan.layers.weight_slot import Layer, RotaryRows, ShardRule, WeightSlot, single
from banyan.model_config.media import TowerConfig
from banyan.model_config.model_config import ModelConfig
from banyan.models.towers.mergers import MERGERS, PatchMerger, norm_of
from banyan.ops.api import PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group

Grid = tuple[int, int, int]
_BICUBIC = -0.75
"""Parameter of the cubic convolution kernel (Keys, 1981) that torch uses too."""


def coordinates(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, int64 [patches] each."""
    frames, height, width = grid
    rows = torch.arange(height).unsqueeze(1).expand(height, width)
    columns = torch.arange(width).expand(height, width)
    row, column = (_by_block(each, merge).repeat(frames) for each in (rows, columns))
    return row, column


def _by_block(values: Tensor, merge: int) -> Tensor:
    """Values [height, width] of one frame in the order of the patches."""
    height, width = values.shape
    blocks = values.reshape(height // merge, merge, width // merge, merge)
    return blocks.transpose(1, 2).flatten()


def by_block(grid: Grid, merge: int) -> Tensor:
    """Where the patches of each block are if patches come row by row, int64 [patches]."""
    frames, height, width = grid
    one = _by_block(torch.arange(height * width).view(height, width), merge)
    return (torch.arange(frames).unsqueeze(1) * height * width + one).flatten()


def buckets(index: Tensor, size: int, side: int) -> Tensor:
    """Places in a table of `side` values for indices on an axis of `size`: the nearest below, in
    the float32 arithmetic of Idefics 3."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    share = (index.float() * (1.0 / torch.tensor(size))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(share, borders, right=True)


def windows(grid: Grid, merge: int, side: int) -> tuple[Tensor, list[int]]:
    """The order of feature rows in which each window's come together, and the patches of each.

    Args:
        side: of a window in feature rows; those at the right and lower edge are smaller.

    returns: int64 [feature rows], and the number of patches of each window.
    """
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    cells = torch.arange(frames * height * width).view(frames, height, width)
    found = [
        cells[frame, top : top + side, left : left + side].flatten()
        for frame in range(frames)
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]
    return torch.cat(found), [len(window) * merge * merge for window in found]


def interpolation(
    grid: Grid, merge: int, side: int, kind: str, is_aligned: bool
) -> tuple[Tensor, Tensor]:
    """Which rows of a learned side x side table make the position of each patch.

    Args:
        kind: "bilinear" | "bicubic".
        is_aligned: corners of the grid lie on corners of the table; otherwise half a cell inside.

    returns: rows int64 and weights fp32, both [patches, taps].
    """
    row, column = coordinates(grid, merge)
    rows, row_weights = _taps(row, grid[1], side, kind, is_aligned)
    columns, column_weights = _taps(column, grid[2], side, kind, is_aligned)
    indices = rows.unsqueeze(2) * side + columns.unsqueeze(1)
    weights = row_weights.unsqueeze(2) * column_weights.unsqueeze(1)
    return indices.flatten(1), weights.flatten(1)


def _taps(
    index: Tensor, size: int, side: int, kind: str, is_aligned: bool
) -> tuple[Tensor, Tensor]:
    """Places in a table of `side` values around each index of an axis of `size`, and weights."""
    if is_aligned:
        place = index.float() * (side - 1) / max(size - 1, 1)
    else:
        place = (index.float() + 0.5) * side / size - 0.5
    below = torch.floor(place)
    offsets = torch.arange(2) if kind == "bilinear" else torch.arange(-1, 3)
    taps = (below.long().unsqueeze(1) + offsets).clamp(0, side - 1)
    distance = (place.unsqueeze(1) - below.unsqueeze(1) - offsets).abs()
    if kind == "bilinear":
        return taps, (1 - distance).clamp(min=0)
    a = _BICUBIC
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return taps, torch.where(distance <= 1, near, far)


@dataclass(frozen=True)
class Segments:
    """Stretches of patches whose members attend to each other; stretches of one length go together.

    Attributes:
        groups: (length, places int64 [segments · length]); None = all patches in their order.
    """

    groups: tuple[tuple[int, Tensor | None], ...]

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> "Segments":
        if len(set(lengths)) == 1:
            return Segments(((lengths[0], None),))
        starts: dict[int, list[int]] = {}
        first = 0
        for length in lengths:
            starts.setdefault(length, []).append(first)
            first += length
        groups = tuple(
            (
                length,
                (torch.tensor(begins).unsqueeze(1) + torch.arange(length)).flatten().to(device),
            )
            for length, begins in starts.items()
        )
        return Segments(groups)


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

    def begin(self, content: Tensor, grid: Grid) -> Any:
        """The state of one item; only this tower reads it.

        content: uint8 [patches, values of a patch], in the order of `patch_grid`, or fp32
        [windows, bands, frames].
        """
        ...

    def run(self, state: Any, first_block: int, blocks: int) -> None:
        """Run some blocks; the first is the one after the last that was run."""
        ...

    def end(self, state: Any) -> Tensor:
        """After all blocks; returns the feature rows, [rows, width]."""
        ...


class Patches(Layer):
    """Projects patches of pixels: a convolution whose stride is its kernel."""

    def __init__(self, config: TowerConfig, build: Build) -> None:
        super().__init__()
        frames = (config.temporal_patch,) if config.temporal_patch > 1 else ()
        self.shape = (config.width, config.channels, *frames, config.patch, config.patch)
        if config.is_patch_flat:
            self.shape = (config.width, config.channels * config.temporal_patch * config.patch**2)
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
    """A learned table of side² positions that is interpolated to each grid, or used as it is.

    The class token's row is where the token is: before or after the others.
    """

    def __init__(self, config: TowerConfig, build: Build) -> None:
        super().__init__()
        self.shape = (config.side**2 + bool(config.class_token), config.width)
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


class LearnedVector(Layer):
    """A learned vector: a class token, or factors on the columns (layer scale)."""

    def __init__(self, width: int, build: Build) -> None:
        super().__init__()
        self.width = width
        self.values = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single((self.width,))}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        self.values = parts[0].dense.to(self.values)


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
            config.has_qkv_bias,
            group,
            build,
            turning={"q": turning, "k": turning},
        )
        self.q_norm = self.k_norm = None
        if config.has_qk_norm:
            sizes = (width, self.head_dim, group, config.eps, build)
            self.q_norm, self.k_norm = SpreadNorm(*sizes), SpreadNorm(*sizes)
        rule = ShardRule(1, self.head_dim)
        self.out = RowLinear(width, width, rule, config.has_output_bias, group, build)
        self.ops = build.ops

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """x: [patches, width]."""
        q, k, v = self.qkv(x).split(self.mine, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in (q, k, v))
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
        self.mlp = kind(
            config.width, config.inner, config.activation, config.has_mlp_bias, group, build
        )
        self.attention_scale = self.mlp_scale = None
        if config.has_layer_scale:
            self.attention_scale = LearnedVector(config.width, build)
            self.mlp_scale = LearnedVector(config.width, build)

    def forward(self, x: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """x: [patches, width]."""
        attended = self.attention(self.attention_norm(x), angles, segments)
        x = x + _scaled(attended, self.attention_scale)
        return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


def _scaled(x: Tensor, scale: LearnedVector | None) -> Tensor:
    return x if scale is None else x * scale.values


class VisionTower(nn.Module):
    """See `Tower`. Empty until `models.weights.loader` has filled it."""

    def __init__(self, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        assert model_config.media is not None and model_config.media.tower is not None
        self.model_config = model_config
        self.config = config = model_config.media.tower
        self.dtype, self.device = build.dtype, build.device
        self.blocks, self.width = config.blocks, config.feature_width
        group = self._group_of(config, build)
        self.patches = Patches(config, build)
        self.class_token = LearnedVector(config.width, build) if config.class_token else None
        self.positions = LearnedPositions(config, build) if config.positions else None
        self.first_norm = norm_of(config, build) if config.has_first_norm else None
        self.layers = nn.ModuleList(TowerBlock(config, group, build) for _ in range(config.blocks))
        self.last_norm = norm_of(config, build, config.last_norm) if config.last_norm else None
        self.merger = MERGERS[config.merger](config, group, build)
        self.deep = nn.ModuleList(
            PatchMerger(config, group, build, is_norm_last=True) for _ in config.deep_blocks
        )
        self.newline = LearnedVector(config.out, build) if config.has_newline else None
        self.frequencies = _frequencies(config).to(build.device)  # [axes, pairs of each]

    @staticmethod
    def _group_of(config: TowerConfig, build: Build) -> Group:
        """The ranks that share the heads; with rows of their own each rank has the whole tower."""
        group = build.groups.attention
        parts = (config.heads, config.inner, config.width * config.merge**2, config.out)
        is_cut = not group.gathers and all(part % group.size == 0 for part in parts)
        return group if is_cut else Group()

    def begin(self, content: Tensor, grid: Grid) -> TowerState:
        """See `Tower`."""
        config = self.config
        frames, height, width = grid
        x = self.patches(content.to(self.device))
        if self.positions is not None and not config.adds_positions_last:
            x = x + self.positions(*self._positions_of(grid))
        x = self._with_class(x, frames)
        if self.first_norm is not None:
            x = self.first_norm(x)
        if self.positions is not None and config.adds_positions_last:
            x = x + self.positions(*self._positions_of(grid))
        angles = self._angles(grid) if config.rope_theta else None
        length = height * width + bool(config.class_token)
        whole = inside = Segments.of([length] * frames, self.device)
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
                state.deep.append(self._in_order(merger(self._cells(state.x)), state.order))

    def end(self, state: TowerState) -> Tensor:
        """See `Tower`."""
        x = self._without_class(state.x, state.grid)
        if self.last_norm is not None:
            x = self.last_norm(x)
        if not self.config.is_by_block and self.config.merge > 1:
            x = x[by_block(state.grid, self.config.merge).to(self.device)]
        rows = self._in_order(self.merger(self._cells(x)), state.order)
        if self.newline is not None:
            rows = torch.cat([rows, self.newline.values.unsqueeze(0)])
        return torch.cat([rows, *state.deep], dim=1)

    def cost(self, grid: Grid) -> int:
        """Multiply-adds of one block, the mean over all blocks."""
        config = self.config
        frames, height, width = grid
        patches = frames * height * width
        matrices = 3 if config.mlp == "gated" else 2
        linear = config.width * (4 * config.width + matrices * config.inner)
        side = config.window * config.merge
        whole = frames * (height * width) ** 2  # pairs of patches that attend
        inside = min(whole, patches * side * side)
        full = len(config.full_blocks) if config.window else config.blocks
        pairs = (whole * full + inside * (config.blocks - full)) // config.blocks
        return patches * linear + 2 * config.width * pairs

    def _positions_of(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Rows of the table for each patch, and their weights."""
        config = self.config
        merge, kind = (config.merge if config.is_by_block else 1), config.positions
        if kind in ("bilinear", "bicubic"):
            rows, weights = interpolation(grid, merge, config.side, kind, config.aligns_corners)
        else:
            row, column = coordinates(grid, merge)
            if kind == "buckets":
                row, column = (
                    buckets(row, grid[1], config.side),
                    buckets(column, grid[2], config.side),
                )
            rows = (row * config.side + column).unsqueeze(1)
            weights = torch.ones(len(rows), 1)
        return (rows + (config.class_token == "first")).to(self.device), weights.to(self.device)

    def _with_class(self, x: Tensor, frames: int) -> Tensor:
        """The patches of each frame, with its class token before or after them."""
        if self.class_token is None:
            return x
        token, is_first = self.class_token.values, self.config.class_token == "first"
        if self.positions is not None:
            token = token + self.positions.table[0 if is_first else -1]
        tokens, x = token.expand(frames, 1, -1), x.unflatten(0, (frames, -1))
        return torch.cat([tokens, x] if is_first else [x, tokens], dim=1).flatten(0, 1)

    def _without_class(self, x: Tensor, grid: Grid) -> Tensor:
        if self.class_token is None:
            return x
        x = x.unflatten(0, (grid[0], -1))
        return (x[:, 1:] if self.config.class_token == "first" else x[:, :-1]).flatten(0, 1)

    def _angles(self, grid: Grid) -> Angles:
        """Half of a head's pairs turn by the row, half by the column; a class token does not."""
        config = self.config
        row, column = coordinates(grid, config.merge if config.is_by_block else 1)
        axes = (column, row) if config.turns_columns_first else (row, column)
        turns = torch.cat(
            [
                (axis.to(self.device) + config.rope_first).unsqueeze(1) * frequencies
                for axis, frequencies in zip(axes, self.frequencies, strict=True)
            ],
            dim=1,
        )
        if config.class_token:
            turns, rest = turns.unflatten(0, (grid[0], -1)), turns.new_zeros(grid[0], 1, 1)
            rest = rest.expand(-1, -1, turns.shape[2])
            parts = [rest, turns] if config.class_token == "first" else [turns, rest]
            turns = torch.cat(parts, dim=1).flatten(0, 1)
        return turns.cos(), turns.sin()

    def _cells(self, x: Tensor) -> Tensor:
        """Patches block by block, [rows, merge², width]."""
        return x.unflatten(0, (-1, self.config.merge**2))

    def _by_window(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of patches [patches, …] in the order of windows."""
        return self._cells(x)[order].flatten(0, 1)

    @staticmethod
    def _in_order(rows: Tensor, order: Tensor | None) -> Tensor:
        """Feature rows [rows, out] in their own order again."""
        if order is None:
            return rows
        out = torch.empty_like(rows)
        out[order] = rows
        return out


def _frequencies(config: TowerConfig) -> Tensor:
    """Frequencies of the pairs that turn by the row, and of those that turn by the column.

    Both axes have the same ones, or take turns over the frequencies of a whole head (Pixtral).
    """
    if not config.rope_theta:
        return torch.empty(2, 0)
    pairs = config.width // config.heads // 2
    each = config.rope_theta ** -(torch.arange(pairs) / pairs)
    own = each if config.alternates_axes else each[::2].repeat_interleave(2)
    return torch.stack([own[0::2], own[1::2]])
