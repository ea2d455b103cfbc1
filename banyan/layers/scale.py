"""Constant factors on what a projection makes, of each of its parts another one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from banyan.layers.build import Build


class Factors:
    """
    Args:
        parts: (width, factor) of what lies side by side. Factors that are all one cost nothing.
    """

    def __init__(self, parts: Sequence[tuple[int, float]], build: Build) -> None:
        self.ops = build.ops
        self.values: Tensor | None = None
        if any(factor != 1.0 for _, factor in parts):
            values = [factor for width, factor in parts for _ in range(width)]
            self.values = torch.tensor(values, dtype=build.dtype, device=build.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, sum of the widths]; returns the same shape."""
        if self.values is None:
            return x
        return self.ops.apply_gate(x, self.values.unsqueeze(0).expand(x.shape[0], -1), "")
