"""GPTQ (arXiv 2210.17323): 2, 3, 4 or 8 bits in groups of inputs, as AutoGPTQ and GPTQModel pack.

    qweight int32 [in·bits/32, out], scales [groups, out], qzeros int32 [groups, out·bits/32],
    g_idx int32 [in]: the group of each input, where the order of activations chose it (desc_act)

The first version of the layout stores zero points less one. What the weights become: `groups.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import (
    FLOATS,
    Parts,
    Restored,
    numbers_of,
    part_among,
    pattern,
)
from banyan.models.weights.quant.groups import (
    Numbers,
    by_index,
    from_groups,
    groups_of,
    unpack_words,
)

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        group: inputs that share a scale; -1 = all of them.
        has_order: the order of activations chose the groups.
        zero_shift: what is to be added to stored zero points.
    """

    bits: int
    group: int
    has_order: bool
    zero_shift: int


@dataclass(frozen=True)
class Gptq:
    """
    Attributes:
        own: patterns of module names -> settings that are theirs, the first one counts.
    """

    settings: Settings
    own: tuple[tuple[re.Pattern[str], Settings], ...] = ()
    remark: str = ""

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among(_PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        found = (settings for names, settings in self.own if names.match(stem))
        settings = next(found, self.settings)
        bits = settings.bits
        words = numbers_of(parts, "qweight", ("I32",), (None, None))
        inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
        group = inputs if settings.group == -1 else settings.group
        groups = groups_of(inputs, group)
        scale = numbers_of(parts, "scales", FLOATS, (groups, outputs)).T
        packed = numbers_of(parts, "qzeros", ("I32",), (groups, -(-outputs * bits // 32)))
        stored = unpack_words(packed, bits)[:, :outputs].T.short()
        zero = (stored + settings.zero_shift) & ((1 << bits) - 1)
        numbers = Numbers(outputs, inputs, bits, lambda rows: unpack_words(words[:, rows].T, bits))
        in_order = torch.arange(inputs) // group
        if settings.has_order or "g_idx" in parts:
            index = numbers_of(parts, "g_idx", ("I32", "I64"), (inputs,))
            if not torch.equal(index.long(), in_order):
                return by_index(numbers, zero, scale, index)
        return from_groups(numbers, zero, scale, group)


def open_gptq(facts: CheckpointFields) -> Gptq:
    layout = facts.text("checkpoint_format", default="gptq")
    if layout not in ("gptq", "gptq_v2") or facts.flag("is_marlin_format", default=False):
        raise facts.error("checkpoint_format", layout, "gptq or gptq_v2")
    if facts.text("pack_dtype", default="int32") != "int32":
        raise facts.error("pack_dtype", facts.any("pack_dtype"), "int32")
    base = Settings(0, 0, False, 1 if layout == "gptq" else 0)
    settings = _settings(facts, base, is_whole=True)
    return Gptq(settings, tuple(_own(facts, settings)))


def _settings(facts: CheckpointFields, base: Settings, is_whole: bool) -> Settings:
    """Args: is_whole: bits and group size must be there."""
    bits = facts.integer("bits", 1, 32, default=None if is_whole else base.bits)
    if bits not in (2, 3, 4, 8):
        raise facts.error("bits", bits, "2, 3, 4 or 8")
    group = facts.integer("group_size", -1, MAX_GROUP, default=None if is_whole else base.group)
    if group == 0:
        raise facts.error("group_size", group, "-1 or positive")
    has_order = facts.flag("desc_act", default=base.has_order)
    return replace(base, bits=bits, group=group, has_order=has_order)


def _own(facts: CheckpointFields, settings: Settings):
    """Settings of modules that a pattern names; "-:" leaves modules as plain floats."""
    listed = facts.any("dynamic") or {}
    own = facts.part("dynamic")
    if own is None or not isinstance(listed, Mapping):
        return
    for text in listed:
        if text.startswith("-:"):
            continue
        names = pattern(text.removeprefix("+:"), "quantization_config, dynamic")
        theirs = own.part(text)
        if theirs is None:
            raise ModelError(f"quantization_config, dynamic: {text!r} must be a mapping")
        yield names, _settings(theirs, settings, is_whole=False)
