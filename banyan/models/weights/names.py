"""From a checkpoint's tensor names to the slots of a model's layers."""

from dataclasses import dataclass

from banyan.models.spec import NameMap


@dataclass(frozen=True)
class Place:
    """Where a tensor goes.

    Attributes:
        module: dotted name of the layer within the model.
        slot: "weight" or "bias".
        part: which part of the slot, "" when it has one.
        is_paired: rows are in interleaved RoPE pairs and must be reordered.
    """

    module: str
    slot: str
    part: str = ""
    is_paired: bool = False


def place_of(name: str, names: NameMap) -> Place | None:
    """The place of a checkpoint tensor, None when the family has none for it."""
    stem, _, slot = name.rpartition(".")
    stem, layer = _split_layer(stem)
    target = names.modules.get(stem)
    if target is None:
        return None
    module, _, part = target.partition(":")
    return Place(module.format(layer), slot, part, target in names.paired)


def is_ignored(name: str, names: NameMap) -> bool:
    return _split_layer(name)[0] in names.ignored


def _split_layer(name: str) -> tuple[str, str]:
    """The name with {} for its first number, and the number: "blk.3.x" -> "blk.{}.x", "3"."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            parts[index] = "{}"
            return ".".join(parts), part
    return name, ""
