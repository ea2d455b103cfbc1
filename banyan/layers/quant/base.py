"""The one thing a quantization method does."""

from typing import Protocol

from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import StoredWeight


class QuantMethod(Protocol):
    def __call__(self, parts: list[StoredWeight], ops: Ops) -> PackedLinear:
        """Pack the parts of one projection.

        parts: this rank's shares, each [out of the part, in], in stacking order.
        returns: one weight [sum of outs, in].
        """
        ...
