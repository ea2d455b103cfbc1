"""modelopt, NVIDIA's quantiser; mixed checkpoints name an algorithm for each module.

FP8                        weight e4m3 [out, in], weight_scale, input_scale
FP8_PER_CHANNEL_PER_TOKEN  the same with weight_scale [out]
FP8_PB_WO                  the same with weight_scale [out/128, 1, in/128, 1]
MXFP8                      weight e4m3, weight_scale uint8 [out, in/32]: exponents biased by 127
NVFP4                      weight uint8 [out, in/2], weight_scale e4m3 [out, in/16],
                           weight_scale_2, input_scale
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.models.weights.quant.fp4 import from_nvfp4
from banyan.models.weights.quant.fp8 import STATIC_REMARK, Fp8
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, FLOAT8_TYPES, StoredWeight

MIXED = "MIXED_PRECISION"
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4")
_PARTS = ("weight_scale", "weight_scale_2", "input_scale")
_SIDE = 128


@dataclass(frozen=True)
class ModelOpt:
    """
    Attributes:
        type: storage type of 8-bit floats, E4M3 or E4M3_DYNAMIC; weights of FP8_PB_WO are E4M3,
            since that algorithm does not round activations.
    """

    remark: str = "activations are not rounded as the checkpoint asks"
    type: str = E4M3

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("U8", *FLOAT8_TYPES)
        return part_among((*_PARTS, "weight") if is_raw else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "weight_scale_2" in parts:
            octets = numbers_of(parts, "weight", ("U8",), (None, None))
            scale = numbers_of(parts, "weight_scale", FLOAT8_TYPES, (None, None))
            factor = numbers_of(parts, "weight_scale_2", FLOATS).flatten()
            return from_nvfp4(octets, scale, float(factor[0]))
        if "weight_scale" in parts and parts["weight_scale"].type == "U8":
            return Fp8((1, BLOCK), type=self.type).restore(stem, parts)
        if "weight_scale" in parts and len(parts["weight_scale"].shape) == 4:
            return _by_blocks(stem, parts)
        numbers_of(parts, "weight_scale", FLOATS)
        return Fp8(None, type=self.type).restore(stem, parts)


def _by_blocks(stem: str, parts: Parts) -> Restored:
    outputs, inputs = numbers_of(parts, "weight", FLOAT8_TYPES, (None, None)).shape
    blocks = (-(-outputs // _SIDE), 1, -(-inputs // _SIDE), 1)
    scale = numbers_of(parts, "weight_scale", FLOATS, blocks).float()
    flat = StoredWeight.from_tensor(scale[:, 0, :, 0].contiguous())
    return Fp8((_SIDE, _SIDE)).restore(stem, {**parts, "weight_scale": flat})


def open_rounding(facts: CheckpointFields) -> ModelOpt:
    """Where activations are rounded to 8-bit floats as the checkpoint asks."""
    own = facts.part("quantization") or facts
    algorithm = own.text("quant_algo")
    has_others = algorithm in (MIXED, "NVFP4")
    found = open_modelopt(facts)
    return replace(found, remark=found.remark if has_others else STATIC_REMARK, type=E4M3_DYNAMIC)


def open_modelopt(facts: CheckpointFields) -> ModelOpt:
    own = facts.part("quantization") or facts
    algorithm = own.text("quant_algo")
    if algorithm == MIXED:
        for layer in _layers(own):
            name = layer.text("quant_algo")
            if name not in ALGORITHMS:
                raise layer.error("quant_algo", name, " or ".join(ALGORITHMS))
        return ModelOpt()
    if algorithm not in ALGORITHMS:
        raise own.error("quant_algo", algorithm, " or ".join((*ALGORITHMS, MIXED)))
    return ModelOpt()


def _layers(own: CheckpointFields) -> Iterator[CheckpointFields]:
    listed, layers = own.any("quantized_layers"), own.part("quantized_layers")
    if layers is None or not isinstance(listed, Mapping) or not listed:
        raise own.error("quantized_layers", listed, f"modules with their algorithms, for {MIXED}")
    for name in listed:
        layer = layers.part(name)
        if layer is None:
            raise layers.error(name, listed[name], "a mapping with quant_algo")
        yield layer
