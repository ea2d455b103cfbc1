"""Translates the tensors of a checkpoint between folder (safetensors) and GGUF: names, splitting
and joining of tensors, row order, and offsets of norms.

Both formats' names map to places of one model (`NameMap`), so this works for every family and in
both directions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    NameMap,
)
from banyan.models.quantize.layouts import HeaderEntry
from banyan.models.quantize.source import SourceCheckpoint
from banyan.models.weights.checkpoint_layouts import (
    half_of_expansion,
    join_expansion,
    stack_between,
)
from banyan.models.weights.names import is_ignored, is_projection, place_of, split_numbers
from banyan.ops.stored import StoredWeight

Take = Callable[[], StoredWeight]
_SHARED = {**HUB_NAMES, **HUB_CORRECTED_EXPERTS, **GGUF_NAMES, **GGUF_EXPERTS}
_OF_ONE_ROW = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")
"""What is a matrix in a folder, and a vector in a GGUF file."""


@dataclass(frozen=True)
class Translated:
    """A tensor of the other form.

    Attributes:
        entry: it; of the type that the first tensor it is made of has.
        hub_name: of (the first of) it in the folder's form.
        is_projection: it may be rounded.
        is_small: a norm, a bias, a router, which stay floats of many bits.
        take: it, of whatever type it has in the source.
    """

    entry: HeaderEntry
    hub_name: str
    is_projection: bool
    is_small: bool
    take: Take


@dataclass(frozen=True)
class _Piece:
    """What a tensor of the source, or a slice of one, brings to a slot.

    Attributes:
        parts: of the slot, "*" for the number of an expert.
        expert: that number, −1 = it is of none.
    """

    entry: HeaderEntry
    parts: tuple[str, ...]
    expert: int
    take: Take


@dataclass(frozen=True)
class _Slot:
    module: str
    name: str


def translated(source: SourceCheckpoint, has_stacks: bool = True) -> list[Translated]:
    """
    Args:
        has_stacks: experts may lie in one tensor, where the form has such; else each has its own.

    Raises:
        ModelError: a tensor that the other form of this family has no name for, or whose rows lie
            in an order of their own.
    """
    if any(names.grouped or names.transposed for names in (source.names, source.other_names)):
        raise ModelError(
            f"{source.model_config.architecture} keeps rows in an order of its own, which is not "
            "brought into the other form's order",
            hint="choose one of the types that keep the form",
        )
    slots: dict[_Slot, list[_Piece]] = {}
    for name in source.tensors:
        if source.names.rope_divisors and name == source.names.rope_divisors:
            continue  # the configuration says it
        for entry, take in _slices(source, name):
            place = place_of(entry.name, source.names)
            if place is None:
                if not is_ignored(entry.name, source.names, source.model_config.num_layers):
                    raise _nameless(entry.name, source)
                continue
            if is_ignored(entry.name, source.names, source.model_config.num_layers):
                continue
            if place.module == "head" and source.model_config.tie_embeddings:
                continue
            parts, expert = _expert_of(place.parts)
            pieces = slots.setdefault(_Slot(place.module, place.slot), [])
            pieces.append(_Piece(entry, parts, expert, take))
    found: list[Translated] = []
    for slot, pieces in slots.items():
        for name, mine in _named(slot, pieces, source, has_stacks):
            found.append(_join(name, slot, mine, source))
    if source.is_gguf and has_stacks and source.other_names.has_gates_between:
        return list(_with_gates_between(found))
    return found


def _with_gates_between(tensors: Sequence[Translated]) -> Iterator[Translated]:
    """Stacks of gates and of ups as one in which they take turns."""
    by_name = {each.entry.name: each for each in tensors}
    for each in tensors:
        stack = stack_between(each.entry.name, len(each.entry.shape))
        if stack is None:
            yield each
        elif each.entry.name == stack.parts[0]:
            parts = [by_name[name] for name in stack.parts]
            entry = HeaderEntry(stack.name, each.entry.type, stack.shape(each.entry.shape))
            takes = [part.take for part in parts]
            take: Take = lambda stack=stack, takes=takes: stack.join([t() for t in takes])  # noqa: E731
            yield replace(each, entry=entry, hub_name=stack.name, take=take)


def _slices(source: SourceCheckpoint, name: str) -> Iterator[tuple[HeaderEntry, Take]]:
    tensor, slices = source.tensors[name], source.slices(name)
    half, other, whole = half_of_expansion(name)
    if half:
        if other not in source.tensors:
            raise ModelError(
                f"{printable(name)} is half of an expansion, and {printable(other)} is missing",
                hint="a file of the model is missing, or damaged",
            )
        if half == 2:
            first, rank = source.tensors[other].shape, tensor.shape[2]
            shape = (tensor.shape[0] * (tensor.shape[1] + first[2]), rank)
            take = lambda: join_expansion(name, source.weight(other), source.weight(name))  # noqa: E731
            yield HeaderEntry(whole, "F32", shape), take
        return
    if not slices:
        yield HeaderEntry(name, tensor.type, tensor.shape), lambda: source.weight(name)
    for each in slices:
        entry = HeaderEntry(each.name, tensor.type, each.shape)
        yield entry, lambda each=each: each.take(source.weight(name))


def _expert_of(parts: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """ "gate3" -> "gate*", 3."""
    stems = [part.rstrip("0123456789") for part in parts]
    numbers = {part[len(stem) :] for part, stem in zip(parts, stems, strict=True)}
    if len(numbers) != 1 or numbers == {""}:
        return parts, -1
    return tuple(f"{stem}*" for stem in stems), int(numbers.pop())


def _named(
    slot: _Slot, pieces: Sequence[_Piece], source: SourceCheckpoint, has_stacks: bool
) -> Iterator[tuple[str, list[_Piece]]]:
    """The tensors of the other form that these pieces make, each with its own, in order."""
    names = source.other_names
    left = {piece.parts: piece for piece in pieces}
    by_parts: dict[tuple[str, ...], list[_Piece]] = {}
    for piece in pieces:
        by_parts.setdefault(piece.parts, []).append(piece)
    numbers = split_numbers(slot.module)[1]
    for template in _in_order(pieces[0], source, has_stacks):
        more = template.count("{}") - len(numbers)
        if not left or more not in (0, 1):
            continue
        for name in _called(template.format(*numbers, *["0"] * more), slot):
            place = place_of(name, names)
            if place is None or _Slot(place.module, place.slot) != slot:
                continue
            if not more and not has_stacks and any("*" in part for part in place.parts):
                continue
            parts = _expert_of(place.parts)[0] if more else place.parts
            covering = _cover(parts, left)
            for mine in _by_expert([by_parts[part] for part in covering], more):
                whole = template.format(*numbers, *[mine[0].expert] * more)
                yield whole + name[len(template.format(*numbers, *["0"] * more)) :], mine
            left = {parts: piece for parts, piece in left.items() if parts not in covering}
    if left:
        raise _nameless(next(iter(left.values())).entry.name, source)


def _in_order(piece: _Piece, source: SourceCheckpoint, has_stacks: bool) -> list[str]:
    """The other form's names: a family's own before those that many share, these before what holds
    several projections; before all the one that is to its table what the piece's name is to its
    own, where both have as many for one place (DeepSeek's queries, squeezed or not)."""
    mine, its = source.names.modules, source.other_names.modules
    template = split_numbers(piece.entry.name.rpartition(".")[0])[0]
    place = mine.get(template)
    alike = [name for name, target in mine.items() if target == place]
    theirs = [name for name, target in its.items() if target == place]
    is_one_of_many = piece.expert < 0 and len(alike) == len(theirs) > 1
    first = [theirs[alike.index(template)]] if is_one_of_many else []
    own = [name for name, target in its.items() if _SHARED.get(name) != target]
    own = [name for name in own if "+" not in its[name] or "*" in its[name]]
    if source.other_names.has_gates_between and has_stacks:
        own.sort(key=lambda name: "*" not in its[name])
    return list(dict.fromkeys([*first, *own, *its]))


def _called(bare: str, slot: _Slot) -> list[str]:
    """What a tensor may be called: weights and biases have a last part of their own, what else
    there is has a whole name."""
    return [bare, *([f"{bare}.{slot.name}"] if slot.name in ("weight", "bias") else [])]


def _by_expert(pieces: Sequence[Sequence[_Piece]], each: int) -> Iterator[list[_Piece]]:
    """All pieces for one tensor, or the pieces of each expert for a tensor of its own."""
    together = [piece for mine in pieces for piece in mine]
    if not each:
        if together:
            yield together
        return
    for expert in sorted({piece.expert for piece in together}):
        yield [piece for piece in together if piece.expert == expert]


def _cover(
    wanted: tuple[str, ...], there: Mapping[tuple[str, ...], object]
) -> list[tuple[str, ...]]:
    """The keys that make the wanted parts in their order; none when they do not."""
    found: list[tuple[str, ...]] = []
    while wanted:
        mine = next((parts for parts in there if parts == wanted[: len(parts)]), None)
        if mine is None:
            return []
        found.append(mine)
        wanted = wanted[len(mine) :]
    return found


def _join(name: str, slot: _Slot, pieces: Sequence[_Piece], source: SourceCheckpoint) -> Translated:
    """Experts lie one after another, and of each its parts over one another."""
    first = pieces[0].entry
    ordered = sorted(pieces, key=lambda piece: piece.expert)
    takes = [_turned(piece, slot.module, source) for piece in ordered]
    experts = sorted({piece.expert for piece in ordered})
    of_one = [piece.entry.shape for piece in ordered if piece.expert == experts[0]]
    shape = (sum(each[0] for each in of_one), *of_one[0][1:])
    is_stack = place_of_parts(name, source.other_names, "*")
    if is_stack:
        _check_experts(name, experts)
        shape = (len(experts), *shape)
    hub_name, names = (name, source.other_names) if source.is_gguf else (first.name, source.names)
    hub_shape = shape if source.is_gguf else first.shape
    if source.is_gguf and hub_name.endswith(_OF_ONE_ROW):
        shape = (1, *shape[-1:])
    elif slot.module.endswith(".shared_gate") and shape[0] == 1:
        shape = shape[1:]
    is_norm = slot.module.rpartition(".")[2].endswith("norm")
    offset = source.names.norm_offset - source.other_names.norm_offset
    plus = offset if is_norm and slot.name == "weight" else 0.0
    is_rounded = is_projection(hub_name, hub_shape, names, source.model_config.num_layers)
    is_rounded = is_rounded and slot.name == "weight" and len(shape) > 1
    is_small = not is_rounded and (
        len(shape) == 1 or slot.module not in ("embedding", "head") or slot.name != "weight"
    )

    def take() -> StoredWeight:
        whole = _over_one_another([each() for each in takes], shape)
        return StoredWeight.from_tensor(whole.dense.float() + plus) if plus else whole

    return Translated(HeaderEntry(name, first.type, shape), hub_name, is_rounded, is_small, take)


def place_of_parts(name: str, names: NameMap, mark: str) -> bool:
    place = place_of(name, names)
    return place is not None and any(mark in part for part in place.parts)


def _over_one_another(parts: Sequence[StoredWeight], shape: tuple[int, ...]) -> StoredWeight:
    type = parts[0].type
    if any(part.type != type for part in parts):
        type, parts = "F32", [StoredWeight.from_tensor(part.dense.float()) for part in parts]
    raw = [part.raw.reshape(-1) for part in parts]
    return StoredWeight.from_bytes(
        type, shape, torch.cat(raw) if len(raw) > 1 else raw[0].contiguous()
    )


def _check_experts(name: str, found: Sequence[int]) -> None:
    if list(found) != list(range(len(found))):
        raise ModelError(
            f"{name} is to hold {len(found)} experts, and their numbers go up to {found[-1]}",
            hint="a file of the checkpoint is missing",
        )


def _turned(piece: _Piece, module: str, source: SourceCheckpoint) -> Take:
    """Rows of queries and keys in the order of the other form: halves of a head become pairs, or
    pairs become halves."""
    place = f"{split_numbers(module)[0]}:{'+'.join(piece.parts)}"
    is_paired, becomes_paired = place in source.names.paired, place in source.other_names.paired
    if is_paired == becomes_paired:
        return piece.take
    model_config = source.model_config
    if model_config.rotary_dim or model_config.latent is not None or source.is_gguf != is_paired:
        raise ModelError(
            f"the rows of {printable(piece.entry.name)} are not brought into the other form's "
            "order",
            hint="choose one of the types that keep the form",
        )
    head_dim = model_config.head_dim

    def take() -> StoredWeight:
        mine = piece.take()
        if is_paired:
            return mine.pair_halves(head_dim, 0, head_dim)
        row_bytes = mine.raw.numel() // mine.shape[0]
        halves = mine.raw.reshape(-1, 2, head_dim // 2, row_bytes)
        return StoredWeight(mine.type, mine.shape, halves.transpose(1, 2).reshape(mine.raw.shape))

    return take


def _nameless(name: str, source: SourceCheckpoint) -> ModelError:
    form = "folder" if source.is_gguf else "GGUF"
    return ModelError(
        f"the {form} form of this family has no name for {printable(name)}",
        hint=f"choose one of the types that {'GGUF files' if source.is_gguf else 'folders'} have",
    )
