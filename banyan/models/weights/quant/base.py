"""Base of the checkpoint quantisation formats: which tensors form one weight, and how to restore
it.

A format translates into storage types (`ops/stored.py`) while tensors are read. Sharding, stacking
and packing depend on the storage type only.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.log import logger, printable
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.ops.stored import RawTensor, StoredWeight

log = logger(__name__)

Stored = StoredWeight | RawTensor
Parts = Mapping[str, Stored]
"""The tensors of one weight by the last part of their names: "weight", "weight_scale_inv" …"""
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "kv_cache_scale")
"""Last parts of names of scales for the KV cache."""
INTEGERS = ("I8", "U8", "I16", "I32", "I64")
FLOATS = ("F32", "F16", "BF16")
_MISMATCH = "the file is damaged, or quantization_config does not describe it"


@dataclass(frozen=True)
class Restored:
    """Attributes:
    weight: [out, in] in a storage type.
    unpacked: why the weight takes more memory than in the checkpoint; "" = it does not, or the
        format always does.
    bias: of the same projection, if the format stores it within its numbers.
    """

    weight: StoredWeight
    unpacked: str = ""
    bias: StoredWeight | None = None


class QuantMethod(Protocol):
    """How one checkpoint was quantised; opened with its configuration."""

    @property
    def remark(self) -> str:
        """Difference from what the checkpoint asks for; "" = none."""
        ...

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        """Which weight a tensor belongs to, and as what: ("…q_proj", "weight_scale"); None when it
        is no part of a quantised weight.

        Args:
            type: of STORAGE_TYPES or RAW_TYPES.
        """
        ...

    def restore(self, stem: str, parts: Parts) -> Restored:
        """The weight "stem.weight" that the parts mean.

        Raises:
            ModelError: parts are missing or do not fit together.
        """
        ...


OpenMethod = Callable[[CheckpointFields], QuantMethod]
"""From the `quantization_config` to the method; ModelError names a setting that is not served."""


def part_among(names: tuple[str, ...], name: str) -> tuple[str, str] | None:
    """For `part_of`: split when the last part of the name is one of these."""
    stem, _, last = name.rpartition(".")
    return (stem, last) if last in names else None


def numbers_of(
    parts: Parts, last: str, kinds: tuple[str, ...], shape: tuple[int | None, ...] | None = None
) -> Tensor:
    """The numbers of a part.

    Args:
        kinds: types that it may have.
        shape: that it must have; None in it = any size.

    Raises:
        ModelError: it is missing, or of another type or shape.
    """
    if last not in parts:
        raise ModelError(
            f"a quantised weight lacks its {last}; it has {', '.join(map(printable, parts))}",
            hint="a file of the checkpoint is missing, or quantization_config does not describe it",
        )
    part = parts[last]
    if part.type not in kinds:
        raise ModelError(f"{last} holds {part.type}, not {' or '.join(kinds)}", hint=_MISMATCH)
    if 0 in part.shape:
        raise ModelError(f"{last} is empty: its shape is {list(part.shape)}", hint=_MISMATCH)
    has_rank = shape is None or len(part.shape) == len(shape)
    if shape is not None and not (
        has_rank and all(w in (None, s) for w, s in zip(shape, part.shape, strict=True))
    ):
        asked = ", ".join("any" if size is None else str(size) for size in shape)
        raise ModelError(
            f"{last} has shape {list(part.shape)}; [{asked}] is needed", hint=_MISMATCH
        )
    return part.values


@dataclass
class _Report:
    """What happened to the weights of one checkpoint, for one line at the end."""

    types: Counter[str]
    unpacked: Counter[str]
    cache_scales: int = 0

    def write(self, label: str, remark: str) -> None:
        types = ", ".join(f"{count} as {type}" for type, count in sorted(self.types.items()))
        log.info("quantised weights: form=%s, %s", label, types or "none")
        for why, count in self.unpacked.items():
            log.warning("%d quantised weights are unpacked to bf16: %s", count, why)
        if self.cache_scales:
            log.warning(
                "%d scales for the KV cache are not used: keys and values are kept as "
                "--kv-cache-dtype says",
                self.cache_scales,
            )
        if remark:
            log.warning("%s: %s", label, remark)


def restored(
    tensors: Iterator[tuple[str, Stored]],
    types: Mapping[str, str],
    method: QuantMethod,
    label: str,
) -> Iterator[tuple[str, Stored]]:
    """The checkpoint with each quantised weight as one tensor "….weight", as soon as its parts are
    read.

    Args:
        types: of all tensors of the checkpoint, by name.
        label: name of the form, for messages.

    Raises:
        ModelError: parts of a weight are missing or do not fit together.
    """
    places = {name: method.part_of(name, type) for name, type in types.items()}
    missing = Counter(place[0] for place in places.values() if place is not None)
    waiting: dict[str, dict[str, Stored]] = {}
    report = _Report(Counter(), Counter())
    for name, tensor in tensors:
        if name.rpartition(".")[2] in CACHE_SCALES:
            report.cache_scales += 1
            continue
        place = places[name]
        if place is None:
            yield name, tensor
            continue
        stem, last = place
        waiting.setdefault(stem, {})[last] = tensor
        missing[stem] -= 1
        if missing[stem]:
            continue
        weight = _restore(method, stem, waiting.pop(stem))
        report.types[weight.weight.type] += 1
        if weight.unpacked:
            report.unpacked[weight.unpacked] += 1
        yield f"{stem}.weight", weight.weight
        if weight.bias is not None:
            yield f"{stem}.bias", weight.bias
    report.write(label, method.remark)


def _restore(method: QuantMethod, stem: str, parts: Parts) -> Restored:
    try:
        return method.restore(stem, parts)
    except ModelError as error:
        raise ModelError(f"{printable(stem)!r}: {error.text}", error.hint) from None


_MAX_PATTERN = 512
_NESTED = re.compile(r"[*+}]\??\)+[*+{]")
"""A repeated group that ends with a repetition: the kind that can take exponential time."""


def pattern(text: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression of the checkpoint; ModelError if it is invalid or may take too
    long."""
    if len(text) > _MAX_PATTERN or _NESTED.search(text):
        raise ModelError(
            f"{printable(where)}: the pattern {printable(text, 80)!r} may take too long",
            hint=f"patterns have at most {_MAX_PATTERN} characters and repeat no repetition",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError):
        raise ModelError(
            f"{printable(where)}: {printable(text, 80)!r} is no regular expression"
        ) from None


class Modules:
    """Modules of a checkpoint that a setting applies to: by name, by pattern, or all of them.

    Args:
        targets: "re:…" = a pattern at the start of a module's name, "a.b" = its name, "Linear" =
            all linear layers.
    """

    def __init__(self, targets: Sequence[str], where: str) -> None:
        self.classes = [name for name in targets if name[:1].isupper() and "." not in name]
        self.names = {name for name in targets if not name.startswith("re:")}
        self.patterns = [pattern(t.removeprefix("re:"), where) for t in targets if t[:3] == "re:"]

    def names_it(self, module: str) -> bool:
        """Whether a name or a pattern matches this module."""
        return module in self.names or any(each.match(module) for each in self.patterns)
