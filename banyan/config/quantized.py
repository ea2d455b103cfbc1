"""Names of the forms in which quantised checkpoints are read, and how flags spell them.

What the tensors of a form mean is known to `models/weights/quant`.
"""

from types import MappingProxyType

SPELLINGS = MappingProxyType(
    {
        "fp8": ("fp8",),
        "gptq": ("gptq", "gptq_marlin"),
        "awq": ("awq", "awq_marlin"),
        "compressed-tensors": ("compressed-tensors",),
        "w8a8_int8": ("w8a8_int8",),
        "modelslim": ("modelslim", "w8a8_int8"),
        "bitsandbytes": ("bitsandbytes",),
        "mxfp4": ("mxfp4",),
        "modelopt": ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
        "auto-round": ("auto-round",),
        "quark": ("quark",),
    }
)
"""Form -> what --quantization may call it. A checkpoint may use these names too; the first form
that has a name is meant."""
_OLDER = MappingProxyType({"intel/auto-round": "auto-round"})
"""What older checkpoints call a form -> that form."""
FLOAT_FORMS = ("fp8", "bitsandbytes", "modelopt")
"""Forms whose weights become plain floats, which --quantization may round again."""


def form_of(name: str) -> str:
    """The form that a checkpoint calls so; an unknown name is its own form."""
    found = (form for form, names in SPELLINGS.items() if name in names)
    return next(found, _OLDER.get(name, name))


def spellings() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in SPELLINGS.values() for name in names))
