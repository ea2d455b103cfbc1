"""compressed-tensors (llm-compressor): groups of modules, each with a scheme of its own.

    packed       weight_packed int32 [out, in·bits/32], weight_scale, weight_shape [2], perhaps
                 weight_zero_point int32 [out·bits/32, groups] and weight_g_idx int32 [in]
    8 bits       weight int8 or fp8 [out, in], weight_scale, perhaps weight_zero_point int8
    4-bit floats weight_packed uint8 [out, in/2], weight_scale, perhaps weight_global_scale

Scales are [out, groups], [out, 1], [1], or [rows, columns] of blocks. A scheme says bits and
groups, the types say what lies in the file.

Source: compressors and quantization arguments of github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import (
    FLOATS,
    INTEGERS,
    Modules,
    Parts,
    Restored,
    numbers_of,
    part_among,
)
from banyan.models.weights.quant.fp4 import from_mxfp4, from_nvfp4
from banyan.models.weights.quant.fp8 import Fp8
from banyan.models.weights.quant.gptq_awq import MAX_GROUP
from banyan.models.weights.quant.groups import (
    Numbers,
    by_index,
    from_groups,
    groups_of,
    unpack_words,
)
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, FLOAT8_TYPES

_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_MAX_BITS = 8
_MAX_TARGETS = 4096


@dataclass(frozen=True)
class Scheme:
    """
    Attributes:
        bits: of one number.
        group: inputs that share a scale; 0 = all of them.
        block: rows and columns that share a scale.
        rounds: activations are rounded to 8-bit floats.
    """

    bits: int
    group: int
    block: tuple[int, int] | None
    rounds: bool = False


@dataclass(frozen=True)
class CompressedTensors:
    """
    Attributes:
        schemes: modules -> what is done to their weights, the first one counts.
        ignored: modules that are left as they are.
        keeps_rounding: activations are rounded to 8-bit floats where a scheme asks for it.
    """

    schemes: tuple[tuple[Modules, Scheme], ...]
    ignored: Modules
    remark: str
    keeps_rounding: bool = False

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        is_raw = type in ("I8", *FLOAT8_TYPES)
        return part_among((*_PARTS, "weight") if is_raw else _PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        scheme = self._scheme_of(stem)
        if "weight_packed" in parts and parts["weight_packed"].type == "U8":
            return _four_bit_floats(parts)
        if "weight_packed" in parts:
            return _packed(parts, scheme)
        if "weight" in parts and parts["weight"].type in FLOAT8_TYPES:
            group = (1, scheme.group) if scheme.group else None
            type = E4M3_DYNAMIC if self.keeps_rounding and scheme.rounds else E4M3
            return Fp8(scheme.block or group, type=type).restore(stem, parts)
        return _eight_bits(parts, scheme)

    def _scheme_of(self, stem: str) -> Scheme:
        if not self.ignored.names_it(stem):
            for modules, scheme in self.schemes:
                if modules.names_it(stem):
                    return scheme
            for modules, scheme in self.schemes:
                if modules.classes:
                    return scheme
        raise ModelError(
            "it has quantised numbers, and quantization_config has no group for it",
            hint="config.json is not the one that belongs to these weights",
        )


def _packed(parts: Parts, scheme: Scheme) -> Restored:
    """Numbers are stored with half of their range added, and so are zero points."""
    shape = [int(size) for size in numbers_of(parts, "weight_shape", INTEGERS, (2,))]
    outputs, inputs = shape
    bits = scheme.bits
    if not (0 < outputs <= 1 << 24 and 0 < inputs <= 1 << 24):
        raise ModelError(f"weight_shape says {shape}")
    words = numbers_of(parts, "weight_packed", ("I32",), (outputs, -(-inputs * bits // 32)))
    numbers = Numbers(
        outputs, inputs, bits, lambda rows: unpack_words(words[rows], bits)[:, :inputs].contiguous()
    )
    group = scheme.group or inputs
    groups = groups_of(inputs, group)
    scale = _scale(parts, outputs, groups)
    zero: Tensor | int = 1 << (bits - 1)
    if "weight_zero_point" in parts:
        packed = (-(-outputs * bits // 32), groups)
        rows = unpack_words(numbers_of(parts, "weight_zero_point", ("I32",), packed).T, bits)
        zero = rows[:, :outputs].T.short()
    if "weight_g_idx" in parts:
        index = numbers_of(parts, "weight_g_idx", ("I32", "I64"), (inputs,))
        if not torch.equal(index.long(), torch.arange(inputs) // group):
            return by_index(numbers, zero, scale, index)
    return from_groups(numbers, zero, scale, group)


def _eight_bits(parts: Parts, scheme: Scheme) -> Restored:
    numbers = numbers_of(parts, "weight", ("I8",), (None, None))
    outputs, inputs = numbers.shape
    group = scheme.group or inputs
    groups = groups_of(inputs, group)
    zero: Tensor | int = 0
    if "weight_zero_point" in parts:
        points = numbers_of(parts, "weight_zero_point", INTEGERS).short()
        zero = _one_per_row(points, outputs, groups, "weight_zero_point") if points.any() else 0
    return from_groups(numbers, zero, _scale(parts, outputs, groups), group)


def _four_bit_floats(parts: Parts) -> Restored:
    octets = numbers_of(parts, "weight_packed", ("U8",), (None, None))
    if "weight_global_scale" not in parts:
        return from_mxfp4(octets, numbers_of(parts, "weight_scale", ("U8",), (None, None)))
    scale = numbers_of(parts, "weight_scale", FLOAT8_TYPES, (None, None))
    factor = float(numbers_of(parts, "weight_global_scale", FLOATS, (1,)))
    if not factor:
        raise ModelError("weight_global_scale is zero")
    return from_nvfp4(octets, scale, 1.0 / factor)


def _scale(parts: Parts, outputs: int, groups: int) -> Tensor:
    return _one_per_row(numbers_of(parts, "weight_scale", FLOATS), outputs, groups, "weight_scale")


def _one_per_row(numbers: Tensor, outputs: int, groups: int, last: str) -> Tensor:
    """[out, groups] from that, from one per output, or from a single one."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(outputs, groups)
    if numbers.numel() != outputs * groups or len(numbers) != outputs:
        raise ModelError(f"{last} has shape {list(numbers.shape)}; [{outputs}, {groups}] is needed")
    return numbers.reshape(outputs, groups)


def open_rounding(facts: CheckpointFields) -> CompressedTensors:
    """Where activations are rounded to 8-bit floats as the checkpoint asks."""
    own = open_compressed(facts)
    listed = [scheme.rounds for _, scheme in own.schemes]
    return replace(own, remark="" if all(listed) else own.remark, keeps_rounding=any(listed))


def open_compressed(facts: CheckpointFields) -> CompressedTensors:
    _check_format(facts, facts)
    for key in ("sparsity_config", "transform_config"):
        value = facts.any(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise facts.error(key, value, "empty: only the numbers are read")
    where = "quantization_config, config_groups"
    groups, listed = facts.part("config_groups"), facts.any("config_groups")
    if groups is None or not isinstance(listed, Mapping):
        raise facts.error("config_groups", listed, "a mapping of groups")
    schemes, rounds = list[tuple[Modules, Scheme]](), False
    for name in listed:
        group = groups.part(name)
        weights = None if group is None else group.part("weights")
        if group is None or weights is None:
            raise groups.error(name, listed[name], "a group with weights")
        _check_format(group, facts)
        rounds = rounds or group.has("input_activations")
        inputs = group.part("input_activations")
        is_float8 = (
            inputs is not None
            and inputs.text("type", default="int") == "float"
            and inputs.integer("num_bits", 1, 32, default=8) == 8
        )
        scheme = replace(_scheme(weights), rounds=is_float8)
        schemes.append((Modules(_texts(group, "targets"), where), scheme))
    ignored = Modules(_texts(facts, "ignore"), "quantization_config, ignore")
    remark = "activations are not rounded as the checkpoint asks" if rounds else ""
    return CompressedTensors(tuple(schemes), ignored, remark)


def _check_format(own: CheckpointFields, facts: CheckpointFields) -> None:
    name = own.text("format", default="dense")
    if name not in _FORMATS:
        raise facts.error("format", name, f"one of {', '.join(_FORMATS)}")


def _texts(facts: CheckpointFields, key: str) -> list[str]:
    listed = facts.listed(key)
    texts = [text for text in listed if isinstance(text, str)]
    if len(texts) != len(listed) or len(texts) > _MAX_TARGETS:
        raise facts.error(key, listed, f"a list of at most {_MAX_TARGETS:,} texts")
    return texts


def _scheme(weights: CheckpointFields) -> Scheme:
    bits = weights.integer("num_bits", 2, _MAX_BITS, default=8)
    strategy = weights.text("strategy", default="group" if weights.has("group_size") else "tensor")
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", strategy, f"one of {', '.join(_STRATEGIES)}")
    if strategy == "block":
        sides = weights.listed("block_structure")
        good = [side for side in sides if isinstance(side, int) and 1 <= side <= MAX_GROUP]
        if len(sides) != 2 or len(good) != 2:
            raise weights.error("block_structure", sides, "two whole numbers")
        return Scheme(bits, 0, (good[0], good[1]))
    group = 0
    if strategy in ("group", "tensor_group"):
        group = max(weights.integer("group_size", -1, MAX_GROUP), 0)
    return Scheme(bits, group, None)
