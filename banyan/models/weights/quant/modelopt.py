"""modelopt, NVIDIA's quantiser: FP8 with one scale per tensor, or NVFP4 in groups of 16.

    FP8    weight fp8 [out, in], weight_scale, input_scale
    NVFP4  weight uint8 [out, in/2], weight_scale fp8 [out, in/16], weight_scale_2, input_scale

Both become bf16.
"""

from dataclasses import dataclass

from banyan.config.facts import Facts
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.models.weights.quant.fp4 import from_nvfp4
from banyan.models.weights.quant.fp8 import Fp8
from banyan.ops.stored import FLOAT8_TYPES

ALGORITHMS = ("FP8", "NVFP4")
_PARTS = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class ModelOpt:
    remark: str = "activations are not rounded as the checkpoint asks"

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("U8", *FLOAT8_TYPES)
        return part_among((*_PARTS, "weight") if is_raw else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "weight_scale_2" not in parts:
            return Fp8(None).restore(stem, parts)
        octets = numbers_of(parts, "weight", ("U8",), (None, None))
        scale = numbers_of(parts, "weight_scale", FLOAT8_TYPES, (None, None))
        factor = numbers_of(parts, "weight_scale_2", FLOATS).flatten()
        return from_nvfp4(octets, scale, float(factor[0]))


def open_modelopt(facts: Facts) -> ModelOpt:
    own = facts.part("quantization") or facts
    algorithm = own.text("quant_algo")
    if algorithm not in ALGORITHMS:
        raise own.error("quant_algo", algorithm, " or ".join(ALGORITHMS))
    return ModelOpt()
