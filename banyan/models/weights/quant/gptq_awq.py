"""GPTQ, AWQ and AutoRound: 2 to 8 bits with scales and zero points in groups of inputs.

GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel pack it:
    qweight int32 [in·bits/32, out], scales [groups, out], qzeros int32 [groups, out·bits/32],
    g_idx int32 [in]: the group of each input, where the order of activations chose it (desc_act)
The first version of the layout stores zero points less one.

AWQ (arXiv 2306.00978), 4 bits, AutoAWQ's "gemm" layout:
    qweight int32 [in, out/8], scales [groups, out], qzeros int32 [groups, out/8]
The eight values of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.

AutoRound (arXiv 2309.05516; export_to_autoround of github.com/intel/auto-round): integers found by
search, packed as GPTQ (auto_round:auto_gptq) or AWQ (auto_round:auto_awq). `extra_config` has
settings by module; modules with 16 bits or more are plain floats.

`groups.py` turns all of them into storage types.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import (
    FLOATS,
    Parts,
    QuantMethod,
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


_AWQ_PARTS = ("qweight", "qzeros", "scales")
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output within a word -> its place from the lowest bits up."""


@dataclass(frozen=True)
class Awq:
    """
    Attributes:
        group: inputs that share a scale; -1 = all of them.
    """

    group: int
    remark: str = ""

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among(_AWQ_PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        words = numbers_of(parts, "qweight", ("I32",), (None, None))
        inputs, outputs = words.shape[0], words.shape[1] * 8
        group = inputs if self.group == -1 else self.group
        groups = groups_of(inputs, group)
        scale = numbers_of(parts, "scales", FLOATS, (groups, outputs))
        zero = numbers_of(parts, "qzeros", ("I32",), (groups, outputs // 8))
        numbers = Numbers(outputs, inputs, 4, lambda rows: _outputs(words, rows))
        return from_groups(numbers, _values(zero).T.short(), scale.T, group)


def _outputs(words: Tensor, rows: slice) -> Tensor:
    """Some outputs, from a multiple of 8 on, [rows, in] uint8."""
    return _values(words[:, rows.start // 8 : -(-rows.stop // 8)]).T.contiguous()


def _values(words: Tensor) -> Tensor:
    """[rows, out/8] int32 -> [rows, out] uint8."""
    values = unpack_words(words, 4).view(len(words), -1, 8)
    return values[..., torch.tensor(_PLACES)].flatten(1)


def open_awq(facts: CheckpointFields) -> Awq:
    bits = facts.integer("bits" if facts.has("bits") else "w_bit", 1, 32)
    if bits != 4:
        raise facts.error("bits", bits, "4")
    version = facts.text("version", default="gemm")
    if version.lower() != "gemm":
        raise facts.error("version", version, "gemm: other layouts are not read")
    if not facts.flag("zero_point", default=True):
        raise facts.error("zero_point", False, "true")
    key = "group_size" if facts.has("group_size") else "q_group_size"
    group = facts.integer(key, -1, MAX_GROUP)
    if group == 0:
        raise facts.error(key, group, "-1 or positive")
    return Awq(group)


_OPEN: Mapping[str, Callable[[CheckpointFields], QuantMethod]] = {
    "auto_round:auto_gptq": open_gptq,
    "auto_round:gptq": open_gptq,
    "auto_round:auto_awq": open_awq,
    "auto_round:awq": open_awq,
}
_MODULE_KEYS = ("bits", "group_size")
_PLAIN_BITS = 16
_SIGNS = frozenset("*+?[](){}|\\^$")
"""What makes a pattern of a module's name."""


@dataclass(frozen=True)
class AutoRound:
    """
    Attributes:
        own: names of modules -> how theirs are read, the first one counts.
    """

    method: QuantMethod
    own: tuple[tuple[re.Pattern[str], QuantMethod], ...]
    remark: str

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among(_PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        own = (method for names, method in self.own if names.fullmatch(stem))
        return next(own, self.method).restore(stem, parts)


def open_auto_round(facts: CheckpointFields) -> AutoRound:
    number = facts.text("data_type", default="int")
    if number != "int":
        raise facts.error("data_type", number, "int")
    key = "packing_format" if facts.has("packing_format") else "backend"
    packing = facts.text(key, default="auto_round:auto_gptq")
    if packing not in _OPEN:
        raise facts.error(key, packing, f"one of {', '.join(_OPEN)}")
    settings = {name: facts.any(name) for name in ("bits", "group_size") if facts.has(name)}
    where = "quantization_config"
    method = _OPEN[packing](CheckpointFields(settings, where))
    own = tuple(_of_modules(facts, settings, _OPEN[packing]))
    rounds = facts.integer("act_bits", 1, 32, default=_PLAIN_BITS) < _PLAIN_BITS
    remark = "activations are not rounded as the checkpoint asks" if rounds else ""
    return AutoRound(method, own, remark)


def _of_modules(
    facts: CheckpointFields,
    settings: Mapping[str, object],
    opened: Callable[[CheckpointFields], QuantMethod],
) -> Iterator[tuple[re.Pattern[str], QuantMethod]]:
    listed = facts.any("extra_config") or {}
    own = facts.part("extra_config")
    if own is None or not isinstance(listed, Mapping):
        return
    for name in listed:
        theirs = own.part(name)
        if theirs is None:
            raise own.error(name, listed[name], "a mapping")
        if theirs.integer("bits", 1, 64, default=1) >= _PLAIN_BITS:
            continue
        number = theirs.text("data_type", default="int")
        if number != "int":
            raise theirs.error("data_type", number, "int")
        merged = {**settings, **{key: theirs.any(key) for key in _MODULE_KEYS if theirs.has(key)}}
        text = name if _SIGNS & set(name) else re.escape(name)
        where = "quantization_config, extra_config"
        yield pattern(text, where), opened(CheckpointFields(merged, where))
