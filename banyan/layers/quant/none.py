"""Weights stored as plain floats."""

from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import StoredWeight, stack


def pack(parts: list[StoredWeight], ops: Ops) -> PackedLinear:
    return ops.pack_linear(stack(parts))
