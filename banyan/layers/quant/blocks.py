"""Weights stored in GGUF blocks: kept as blocks for a kernel that multiplies with them.

Parts of different types (a file may store v finer than q and k) stay apart when their kernel wants
blocks, because stacking them would mean unpacking; one packed weight answers for all of them.
"""

import torch
from torch import Tensor

from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import StoredWeight, stack


class SideBySide:
    """Several packed weights whose outputs lie side by side."""

    def __init__(self, packed: list[PackedLinear]) -> None:
        self.packed = packed

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.cat([weight(x) for weight in self.packed], dim=-1)
        return out if bias is None else out + bias


def pack(parts: list[StoredWeight], ops: Ops) -> PackedLinear:
    runs: list[list[StoredWeight]] = []
    for part in parts:
        if runs and runs[-1][0].type == part.type:
            runs[-1].append(part)
        else:
            runs.append([part])
    packed = [ops.pack_linear(stack(run)) for run in runs]
    return packed[0] if len(packed) == 1 else SideBySide(packed)
