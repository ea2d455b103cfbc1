"""How the stored parts of a projection become one packed weight, by the way they are quantised."""

from banyan.base.table import Table
from banyan.layers.quant.base import QuantMethod
from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import STORAGE_TYPES, StoredWeight

QUANT_METHODS: Table[QuantMethod] = Table(
    "quantization",
    {"none": "banyan.layers.quant.none:pack", "blocks": "banyan.layers.quant.blocks:pack"},
    plugins="banyan.quantizations",
)


def pack(parts: list[StoredWeight], ops: Ops) -> PackedLinear:
    """Stack the parts along the output dimension and bring them into the bound kernel's form."""
    floats = all(STORAGE_TYPES[part.type].is_float for part in parts)
    return QUANT_METHODS.load("none" if floats else "blocks")(parts, ops)
