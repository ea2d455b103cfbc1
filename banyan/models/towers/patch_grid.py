"""Geometry of a grid of patches: coordinates, windows and the weights of interpolated positions.

A grid is (t, h, w) in patches. Patches come frame by frame; within a frame the merge x merge
neighbours that become one feature row come together, row by row of such blocks. With merge 1 that
is the order of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
