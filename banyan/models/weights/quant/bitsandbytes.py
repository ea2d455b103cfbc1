"""bitsandbytes: 4-bit levels of a table in blocks of the flattened weight (QLoRA,
arXiv 2305.14314), or 8-bit integers by output (LLM.int8, arXiv 2208.07339).

    4 bits  weight uint8 [in·out/2, 1], the first value in the high half; weight.quant_map [16];
            weight.absmax, a scale per block, perhaps 8-bit itself with weight.nested_quant_map and
            weight.nested_absmax; weight.quant_state.bitsandbytes__nf4: JSON in bytes
    8 bits  weight int8 [out, in], SCB fp32 [out]: a row's largest number

No storage type has the levels of a table, so 4 bits become bf16; 8 bits become Q8_0.
"""

import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of
from banyan.models.weights.quant.groups import from_groups
from banyan.ops.stored import StoredWeight

_STATE = "quant_state.bitsandbytes__"
_PARTS_OF_FOUR = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_KINDS = ("nf4", "fp4")
_MAX_STATE = 1 << 16
_MAX_SIZE = 1 << 24


@dataclass(frozen=True)
class BitsAndBytes:
    remark: str

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        stem, _, last = name.rpartition(".weight.")
        if stem and (last in _PARTS_OF_FOUR or last.startswith(_STATE)):
            return stem, "state" if last.startswith(_STATE) else last
        stem, _, last = name.rpartition(".")
        if last in ("SCB", "weight_format") or (last == "weight" and type in ("U8", "I8")):
            return stem, last
        return None

    def restore(self, stem: str, parts: Parts) -> Restored:
        if "state" in parts or "quant_map" in parts:
            return _four_bits(parts)
        numbers = numbers_of(parts, "weight", ("I8",), (None, None))
        outputs, inputs = numbers.shape
        scale = numbers_of(parts, "SCB", FLOATS, (outputs,)).float().view(-1, 1) / 127
        return from_groups(numbers, 0, scale, inputs)


def _four_bits(parts: Parts) -> Restored:
    octets = numbers_of(parts, "state", ("U8",), (None,))
    state = _state(bytes(octets.tolist()) if len(octets) <= _MAX_STATE else b"")
    shape = tuple(size for size in state.listed("shape") if isinstance(size, int))
    if len(shape) != 2 or not all(1 <= size <= _MAX_SIZE for size in shape):
        raise state.error("shape", state.listed("shape"), "outputs and inputs")
    size = math.prod(shape)
    block = state.integer("blocksize", 1, _MAX_SIZE)
    table = numbers_of(parts, "quant_map", FLOATS, (16,)).float()
    packed = numbers_of(parts, "weight", ("U8",)).flatten()
    if len(packed) != (size + 1) // 2:
        raise ModelError(f"weight has {len(packed)} bytes; {list(shape)} numbers need {size // 2}")
    levels = table[torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[:size].long()]
    scale = _scales(parts, state, -(-size // block))
    values = levels * scale.repeat_interleave(block)[:size]
    why = "no storage type has the levels of their table"
    return Restored(StoredWeight.from_tensor(values.view(shape).bfloat16()), why)


def _scales(parts: Parts, state: CheckpointFields, count: int) -> Tensor:
    """The largest number of each block, which may be quantised itself."""
    if "nested_absmax" not in parts:
        return numbers_of(parts, "absmax", FLOATS, (count,)).float()
    block = state.integer("nested_blocksize", 1, _MAX_SIZE)
    offset = state.number("nested_offset", -1e30, 1e30)
    table = numbers_of(parts, "nested_quant_map", FLOATS, (256,)).float()
    numbers = numbers_of(parts, "absmax", ("U8",), (count,)).long()
    outer = numbers_of(parts, "nested_absmax", FLOATS, (-(-count // block),)).float()
    return table[numbers] * outer.repeat_interleave(block)[:count] + offset


def _state(raw: bytes) -> CheckpointFields:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError("its quant_state is no JSON") from None
    if not isinstance(state, dict):
        raise ModelError("its quant_state is no JSON object")
    facts = CheckpointFields(state, "quant_state")
    kind = facts.text("quant_type")
    if kind not in _KINDS:
        raise facts.error("quant_type", kind, " or ".join(_KINDS))
    return facts


def open_bitsandbytes(facts: CheckpointFields) -> BitsAndBytes:
    four = facts.flag("load_in_4bit", default=False)
    eight = facts.flag("load_in_8bit", default=False)
    if four == eight:
        raise facts.error("load_in_4bit", four, "true, or load_in_8bit")
    return BitsAndBytes("activations are not rounded to 8 bits as LLM.int8 asks" if eight else "")
