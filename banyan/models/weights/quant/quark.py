"""quark, AMD's quantiser: 8-bit floats, 8-bit integers, or 4-bit floats in blocks of 32.

    fp8_e4m3  weight e4m3 [out, in], weight_scale [1] or [out]
    int8      weight int8 [out, in], weight_scale [1] or [out], weight_zero_point (zero)
    fp4       weight uint8 [out, in/2], the first number in the low half; weight_scale uint8
              [out, in/32], exponents biased by 127 (OCP Microscaling 1.0)

`global_quant_config` holds for all modules, `layer_quant_config` for patterns of their names; the
dtype of a tensor selects its form.

Source: the export pages of the documentation of AMD Quark for PyTorch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.models.weights.quant.fp4 import from_mxfp4
from banyan.models.weights.quant.fp8 import STATIC_REMARK, Fp8
from banyan.models.weights.quant.int8 import by_output
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, FLOAT8_TYPES

_PARTS = (
    "weight_scale",
    "weight_zero_point",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
_TYPES = {"fp8_e4m3": FLOAT8_TYPES, "int8": ("I8",), "fp4": ("U8",)}
_SCHEMES = {"fp8_e4m3": ("per_tensor", "per_channel", "per_group")}
_SCHEMES |= {"int8": ("per_tensor", "per_channel")}
_SCHEMES |= {"fp4": ("per_group",)}


@dataclass(frozen=True)
class Quark:
    """
    Attributes:
        types: that weights may have, of all settings.
        kept: storage type of 8-bit floats, E4M3 or E4M3_DYNAMIC.
    """

    types: tuple[str, ...]
    remark: str
    kept: str = E4M3

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("I8", "U8", *FLOAT8_TYPES)
        return part_among((*_PARTS, "weight") if is_raw else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "weight" not in parts or parts["weight"].type not in self.types:
            numbers_of(parts, "weight", self.types)
        kind = parts["weight"].type
        if kind == "U8":
            octets = numbers_of(parts, "weight", ("U8",), (None, None))
            return from_mxfp4(octets, numbers_of(parts, "weight_scale", ("U8",), (None, None)))
        numbers_of(parts, "weight_scale", FLOATS)
        return by_output(parts) if kind == "I8" else Fp8(None, type=self.kept).restore(stem, parts)


def open_rounding(facts: CheckpointFields) -> Quark:
    """Where activations are rounded to 8-bit floats as the checkpoint asks."""
    own = open_quark(facts)
    wishes = [each.part("input_tensors") for each in _settings(facts)]
    if not any(wish is not None and wish.text("dtype") == "fp8_e4m3" for wish in wishes):
        return own
    has_others = any(kind not in FLOAT8_TYPES for kind in own.types)
    return replace(own, remark=own.remark if has_others else STATIC_REMARK, kept=E4M3_DYNAMIC)


def open_quark(facts: CheckpointFields) -> Quark:
    types, rounds = list[str](), False
    for own in _settings(facts):
        weight = own.part("weight")
        if weight is None:
            continue
        kind = weight.text("dtype")
        if kind not in _TYPES:
            raise weight.error("dtype", kind, f"one of {', '.join(_TYPES)}")
        scheme = weight.text("qscheme")
        if scheme not in _SCHEMES[kind]:
            raise weight.error("qscheme", scheme, f"{' or '.join(_SCHEMES[kind])} for {kind}")
        if kind == "fp4":
            _check_the_blocks(weight)
        types += _TYPES[kind]
        rounds = rounds or own.part("input_tensors") is not None
    if not types:
        raise ModelError("quantization_config of quark names no weight that is rounded")
    remark = "activations are not rounded as the checkpoint asks" if rounds else ""
    return Quark(tuple(dict.fromkeys(types)), remark)


def _check_the_blocks(weight: CheckpointFields) -> None:
    group = weight.integer("group_size", 1, 1 << 16)
    if group != BLOCK:
        raise weight.error("group_size", group, f"{BLOCK} for fp4")
    scale = weight.text("scale_format", default="e8m0")
    if scale != "e8m0":
        raise weight.error("scale_format", scale, "e8m0 for fp4")


def _settings(facts: CheckpointFields) -> Iterator[CheckpointFields]:
    whole = facts.part("global_quant_config")
    if whole is not None:
        yield whole
    for key in ("layer_quant_config", "layer_type_quant_config"):
        listed, parts = facts.any(key), facts.part(key)
        if parts is None or not isinstance(listed, Mapping):
            continue
        for name in listed:
            own = parts.part(name)
            if own is not None:
                yield own
