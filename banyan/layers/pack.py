"""From the stored parts of a projection to one packed weight.

Parts of different types (a file may store v finer than q and k) stay apart when their kernels want
blocks, because stacking them would mean unpacking; one packed weight answers for all of them.
"""

from itertools import groupby

from torch import Tensor

from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import STORAGE_TYPES, StoredWeight, stack


class SideBySide:
    """Several packed weights whose outputs lie side by side."""

    def __init__(self, packed: list[PackedLinear], widths: list[int], ops: Ops) -> None:
        self.packed = packed
        self.widths = widths
        self.ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = [None] * len(self.packed) if bias is None else bias.split(self.widths)
        outs = [weight(x, part) for weight, part in zip(self.packed, biases, strict=True)]
        return self.ops.concat(outs)


def pack(parts: list[StoredWeight], ops: Ops) -> PackedLinear:
    """Bring the parts [out of the part, in] into the bound kernel's form, stacked in this order."""
    if all(STORAGE_TYPES[part.type].is_float for part in parts):
        return ops.pack_linear(stack(parts))
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.type)]
    packed = [ops.pack_linear(stack(run)) for run in runs]
    widths = [sum(part.shape[0] for part in run) for run in runs]
    return packed[0] if len(packed) == 1 else SideBySide(packed, widths, ops)
