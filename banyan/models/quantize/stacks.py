"""Tensors that hold all experts of a layer, taken apart: quantised folders have a module for each
expert, as published ones do, and its tensors are slices of those of the source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from banyan.families.names import NameMap
from banyan.models.weights.interleaved import halves_of
from banyan.models.weights.names import place_of, split_numbers
from banyan.ops.stored import StoredWeight


@dataclass(frozen=True)
class Slice:
    """What one module takes of a tensor.

    Attributes:
        name: of the tensor that it becomes.
        take: it, from the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    take: Callable[[StoredWeight], StoredWeight]


def slices_of(name: str, shape: Sequence[int], names: NameMap) -> list[Slice]:
    """The modules whose weights or biases a tensor holds one behind another; none when it is no
    stack, or the family has no names for its experts."""
    if len(shape) < 2:
        return []
    halves = halves_of(name, len(shape)) if names.has_gates_between else []
    if not halves:
        return list(_over_one_another(name, shape, names))
    inner = tuple(reversed(shape[1:]))
    found: list[Slice] = []
    for half in halves:
        taken = (inner[0] // half.step, *inner[1:])
        for expert in range(shape[0]):
            named = _name_of(half.name, 0, expert, names)
            if not named:
                return []
            found.append(Slice(named, taken, lambda t, e=expert, h=half: h.take(t.at(e))))
    return found


def _over_one_another(name: str, shape: Sequence[int], names: NameMap) -> Iterator[Slice]:
    place = place_of(name, names)
    if place is None or not all("*" in part for part in place.parts):
        return
    count = len(place.parts)
    rows = shape[1] // count
    for part in range(count):
        for expert in range(shape[0]):
            named = _name_of(name, part, expert, names)
            if not named:
                return
            taken = (rows, *shape[2:])
            first = part * rows

            def take(t: StoredWeight, e: int = expert, first: int = first) -> StoredWeight:
                return t.at(e).cut(0, first, first + rows)

            yield Slice(named, taken, take)


def _name_of(stack: str, part: int, expert: int, names: NameMap) -> str:
    """What a checkpoint with a module for each expert calls a part of one, "" = it has no name."""
    place = place_of(stack, names)
    if place is None:
        return ""
    module, numbers = split_numbers(place.module)
    wanted = f"{module}:{place.parts[part].replace('*', '{}')}"
    found = [template for template, target in names.modules.items() if target == wanted]
    if not found:
        return ""
    # Some families have several names for a layer: the one that begins like the stack's.
    near = max(found, key=lambda template: len(commonprefix((template, split_numbers(stack)[0]))))
    return f"{near.format(*numbers, expert)}.{place.slot}"
