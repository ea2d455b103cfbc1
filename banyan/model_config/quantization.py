"""Names of quantization methods, in checkpoints and in --quantization.

`models/weights/quant` reads the tensors of each method.
"""

from types import MappingProxyType

SPELLINGS = MappingProxyType(
    {
        "fp8": ("fp8", "mxfp8", "w8a8_fp8"),
        "w4afp8": ("w4afp8",),
        "gptq": ("gptq", "gptq_marlin", "moe_wna16"),
        "awq": ("awq", "awq_marlin", "moe_wna16"),
        "compressed-tensors": ("compressed-tensors", "w8a8_int8", "w8a8_fp8", "auto-round-int8"),
        "w8a8_int8": ("w8a8_int8",),
        "modelslim": ("modelslim", "w8a8_int8"),
        "bitsandbytes": ("bitsandbytes",),
        "mxfp4": ("mxfp4",),
        "modelopt": ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed", "petit_nvfp4"),
        "auto-round": ("auto-round",),
        "quark": ("quark",),
    }
)
"""Method -> names that --quantization accepts for it. A checkpoint may use these names too: a
method's own name wins, then the first method with this name."""
_OLDER = MappingProxyType(
    {"intel/auto-round": "auto-round", "compressed_tensors": "compressed-tensors"}
)
"""Names in older checkpoints -> method."""
FLOAT_FORMS = ("fp8", "bitsandbytes", "modelopt")
"""Methods with float weights, which --quantization may quantize again."""


def form_of(name: str) -> str:
    """The method for a checkpoint's name of it; an unknown name is returned unchanged."""
    if name in SPELLINGS:
        return name
    found = (form for form, names in SPELLINGS.items() if name in names)
    return next(found, _OLDER.get(name, name))


def spellings() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in SPELLINGS.values() for name in names))
