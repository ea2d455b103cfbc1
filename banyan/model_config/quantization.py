"""Names of the forms in which quantised checkpoints are read, and how flags spell them.

What the tensors of a form mean is known to `models/weights/quant`.
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
"""Form -> what --quantization may call it. A checkpoint may use these names too; the first form
that has a name is meant, or the one that is called so."""
_OLDER = MappingProxyType(
    {"intel/auto-round": "auto-round", "compressed_tensors": "compressed-tensors"}
)
"""What older checkpoints call a form -> that form."""
FLOAT_FORMS = ("fp8", "bitsandbytes", "modelopt")
"""Forms whose weights are floats, which --quantization may round again."""


def form_of(name: str) -> str:
    """The form that a checkpoint calls so; an unknown name is its own form."""
    if name in SPELLINGS:
        return name
    found = (form for form, names in SPELLINGS.items() if name in names)
    return next(found, _OLDER.get(name, name))


def spellings() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in SPELLINGS.values() for name in names))
