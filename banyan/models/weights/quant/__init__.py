"""Formats of quantised checkpoints, by the `quant_method` of their configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from banyan.base.table import Table
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import QuantFacts
from banyan.models.weights.quant.base import OpenMethod, QuantMethod
from banyan.ops.activation_quant import STATIC
from banyan.ops.stored import E4M3_DYNAMIC


@dataclass(frozen=True)
class QuantForm:
    """
    Attributes:
        opens: "module:function" from its settings to a QuantMethod.
        reads: which of its variants are read.
        becomes: the storage types that hold its weights.
    """

    opens: str
    reads: str
    becomes: str


_HERE = "banyan.models.weights.quant"
_ROUNDED = {
    STATIC: {"w8a8_int8": "int8", "modelslim": "modelslim"},
    E4M3_DYNAMIC: {
        "fp8": "fp8",
        "compressed-tensors": "compressed",
        "modelopt": "modelopt",
        "quark": "quark",
    },
}
"""Storage type with rounded activations -> forms that ask for it -> where they are read."""
_EIGHT_BIT_FLOATS = (
    "E4M3 with a scale per 32 inputs; BF16 for e5m2, for groups and blocks that are no multiple of "
    "32 wide, and on NPUs"
)
FORMS = {
    "fp8": QuantForm(
        f"{_HERE}.fp8:open_fp8",
        "e4m3 or e5m2; a scale per tensor, output, group of inputs or block, also a power of two "
        "(MXFP8); also stacks of experts",
        _EIGHT_BIT_FLOATS,
    ),
    "w4afp8": QuantForm(
        f"{_HERE}.fp8:open_w4afp8",
        "experts in 4-bit integers, a scale per group of inputs; the others as fp8 in blocks of "
        "128 × 128",
        "Q4_0 for experts; the others as the form fp8",
    ),
    "gptq": QuantForm(
        f"{_HERE}.gptq_awq:open_gptq",
        "2, 3, 4 or 8 bits, both layouts, `desc_act`, `dynamic` settings by module",
        "Q4_0; Q4_1 with zero points; Q8_0 for 8 bits; BF16 with `desc_act`",
    ),
    "awq": QuantForm(
        f"{_HERE}.gptq_awq:open_awq",
        "4 bits with zero points, `gemm` layout",
        "Q4_1; Q4_0 where zero points allow it",
    ),
    "compressed-tensors": QuantForm(
        f"{_HERE}.compressed:open_compressed",
        "`int-quantized`, `pack-quantized` (2 to 8 bits), `float-quantized`, `naive-quantized`, "
        "`mxfp4-pack-quantized`, `nvfp4-pack-quantized`, mixed by module",
        "Q8_0 for 8-bit integers; Q4_0, Q4_1 for 4 bits; MXFP4 as it is; fp8 as the form fp8; "
        "NVFP4, or BF16 where experts do not multiply with it",
    ),
    "w8a8_int8": QuantForm(
        f"{_HERE}.int8:open_int8", "8-bit integers, a scale per output, symmetric", "Q8_0"
    ),
    "modelslim": QuantForm(
        f"{_HERE}.modelslim:open_modelslim",
        "W8A8, W8A8_DYNAMIC, W8A16, W4A8_DYNAMIC and FLOAT by tensor, symmetric",
        "Q8_0",
    ),
    "bitsandbytes": QuantForm(
        f"{_HERE}.bitsandbytes:open_bitsandbytes",
        "nf4 and fp4, with or without nested scales; 8-bit integers",
        "BF16 for 4 bits; Q8_0 for 8",
    ),
    "mxfp4": QuantForm(
        f"{_HERE}.fp4:open_mxfp4",
        "stacks of experts in blocks of 32 4-bit floats (e2m1) with a power of two each (e8m0)",
        "MXFP4, to the bit",
    ),
    "modelopt": QuantForm(
        f"{_HERE}.modelopt:open_modelopt",
        "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, mixed by module",
        "FP8 and MXFP8 as the form fp8; NVFP4, or BF16 where experts do not multiply with it",
    ),
    "auto-round": QuantForm(
        f"{_HERE}.gptq_awq:open_auto_round",
        "packed as gptq (2, 3, 4 or 8 bits) or awq (4 bits), `extra_config` by module",
        "as gptq and awq",
    ),
    "quark": QuantForm(
        f"{_HERE}.quark:open_quark",
        "fp8 with a scale per tensor, output or group, int8 with one per tensor or output, MXFP4, "
        "mixed by module",
        "fp8 as the form fp8; Q8_0 for int8; MXFP4 as it is",
    ),
}

QUANT_METHODS: Table[OpenMethod] = Table(
    "quantization of a checkpoint",
    {name: form.opens for name, form in FORMS.items()},
    plugins="banyan.quantizations",
)


ROUNDING: Table[OpenMethod] = Table(
    "quantization with rounded activations",
    {
        name: f"{_HERE}.{file}:open_rounding"
        for files in _ROUNDED.values()
        for name, file in files.items()
    },
)


def open_method(quant: QuantFacts, where: str, rounded: Sequence[str] = ()) -> QuantMethod:
    """The method of a checkpoint; ConfigError when its name is unknown, ModelError when a setting
    is not served.

    Args:
        rounded: storage types with which the device rounds activations to 8 bits.
    """
    is_rounded = any(quant.method in _ROUNDED[type] for type in rounded)
    table = ROUNDING if is_rounded else QUANT_METHODS
    opened = table.load(quant.method)
    return opened(CheckpointFields(json.loads(quant.settings), f"{where}, quantization_config"))


def overview(spellings: Mapping[str, Sequence[str]]) -> str:
    """The table of docs/quantization.md.

    Args:
        spellings: form -> names that a flag may give it.
    """
    lines = ["| form | `--quantization` | variants | storage type |", "|---|---|---|---|"]
    for name, form in FORMS.items():
        spelled = ", ".join(f"`{spelling}`" for spelling in spellings[name])
        cells = (name, spelled, form.reads, form.becomes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
