"""Maps checkpoint tensor names to the slots of a model's layers."""

import re
from dataclasses import dataclass

from banyan.families.names import NameMap


@dataclass(frozen=True)
class WeightPlace:
    """Where a tensor goes.

    Attributes:
        module: dotted name of the layer in the model.
        slot: "weight" or "bias".
        parts: parts of the slot that are stacked in the tensor; "" if the slot has one part.
        paired: parts whose rows are in interleaved RoPE pairs.
    """

    module: str
    slot: str
    parts: tuple[str, ...] = ("",)
    paired: tuple[str, ...] = ()


def place_of(name: str, names: NameMap) -> WeightPlace | None:
    """The place of a checkpoint tensor; None if the family has none for it."""
    template, numbers = split_numbers(name)
    stem, _, slot = template.rpartition(".")
    target = names.modules.get(template)
    if target is not None:
        target, _, slot = target.rpartition(".")
    elif (target := names.modules.get(stem)) is None:
        return None
    module, _, listed = target.partition(":")
    parts = listed.split("+")
    paired = [(f"{module}:{part}" if part else module) in names.paired for part in parts]
    filled = target.format(*numbers)
    module, _, listed = filled.partition(":")
    parts = listed.split("+")
    turned = tuple(part for part, is_paired in zip(parts, paired, strict=True) if is_paired)
    return WeightPlace(module, slot, tuple(parts), turned)


def is_ignored(name: str, names: NameMap, num_layers: int) -> bool:
    if names.unread and name.startswith(names.unread):
        return True
    template, numbers = split_numbers(name)
    if names.has_more_layers and template.startswith(("model.layers.{}.", "blk.{}.")):
        return int(numbers[0]) >= num_layers
    return template in names.ignored


def split_numbers(name: str) -> tuple[str, list[str]]:
    """The name with {} for its numbers, and the numbers: "blk.3.x" -> "blk.{}.x", ["3"]."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdecimal()]
    return ".".join("{}" if part.isdecimal() else part for part in parts), numbers


_ROUNDED = re.compile(
    r"layers\.(\d+)\.(attention\.(qkv|query|out|squeeze|latent|expansion|mix)"
    r"|mlp\.(experts\.|shared\.)?(gate_up|up|down))"
)


def is_projection(name: str, shape: tuple[int, ...], names: NameMap, num_layers: int) -> bool:
    """Whether a tensor is the matrix of a projection. Only those are quantised, on disk or while
    loading; embeddings, heads, norms, routers, convolutions, gates and the indexer of sparse
    attention stay unquantised.

    Args:
        num_layers: of the model without MTP layers, which stay unquantised too.
    """
    if not name.endswith(".weight") or len(shape) < 2:
        return False
    place = place_of(name, names) or place_of(f"model.{name}", names)
    if place is None or place.slot != "weight":
        return False
    found = _ROUNDED.fullmatch(place.module)
    return found is not None and int(found[1]) < num_layers
