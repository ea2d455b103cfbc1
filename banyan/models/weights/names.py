"""From a checkpoint's tensor names to the slots of a model's layers."""

from dataclasses import dataclass

from banyan.models.spec import NameMap


@dataclass(frozen=True)
class Place:
    """Where a tensor goes.

    Attributes:
        module: dotted name of the layer within the model.
        slot: "weight" or "bias".
        parts: which parts of the slot, over one another in the tensor; "" when it has one.
        paired: those of the parts whose rows are in interleaved RoPE pairs.
    """

    module: str
    slot: str
    parts: tuple[str, ...] = ("",)
    paired: tuple[str, ...] = ()


def place_of(name: str, names: NameMap) -> Place | None:
    """The place of a checkpoint tensor, None when the family has none for it."""
    stem, _, slot = name.rpartition(".")
    stem, layer = _split_layer(stem)
    target = names.modules.get(stem)
    if target is None:
        return None
    module, _, listed = target.partition(":")
    parts = tuple(listed.split("+"))
    paired = tuple(part for part in parts if f"{module}:{part}" in names.paired)
    return Place(module.format(layer), slot, parts, paired)


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
