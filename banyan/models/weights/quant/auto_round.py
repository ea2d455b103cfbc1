"""auto-round (arXiv 2309.05516): integers found by search, packed as in GPTQ or AWQ.

    auto_round:auto_gptq    qweight, qzeros, scales as `gptq.py` reads them, zero points less one
    auto_round:auto_awq     the same names as `awq.py` reads them

`extra_config` has settings by module; modules with 16 bits or more are plain floats.

Source: export_to_autoround of github.com/intel/auto-round.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.awq import open_awq
from banyan.models.weights.quant.base import Parts, QuantMethod, Restored, part_among, pattern
from banyan.models.weights.quant.gptq import open_gptq

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_OPEN: Mapping[str, Callable[[CheckpointFields], QuantMethod]] = {
    "auto_round:auto_gptq": open_gptq,
    "auto_round:gptq": open_gptq,
    "auto_round:auto_awq": open_awq,
    "auto_round:awq": open_awq,
}
_OWN = ("bits", "group_size")
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
    own = tuple(_own(facts, settings, _OPEN[packing]))
    rounds = facts.integer("act_bits", 1, 32, default=_PLAIN_BITS) < _PLAIN_BITS
    remark = "activations are not rounded as the checkpoint asks" if rounds else ""
    return AutoRound(method, own, remark)


def _own(
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
        merged = {**settings, **{key: theirs.any(key) for key in _OWN if theirs.has(key)}}
        text = name if _SIGNS & set(name) else re.escape(name)
        where = "quantization_config, extra_config"
        yield pattern(text, where), opened(CheckpointFields(merged, where))
