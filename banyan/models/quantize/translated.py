"""The tensors of a folder under the names of a GGUF file: what is one tensor there is put together,
rows are brought into its order, and small tensors are fp32, as its readers want them.

Both forms' names lead to places of one model (`NameMap`), so no family is named here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families.names import NameMap
from banyan.formats.headers import Entry
from banyan.models.quantize.source import Source
from banyan.models.weights.names import is_ignored, place_of, split_numbers
from banyan.ops.stored import StoredWeight

Take = Callable[[], StoredWeight]


@dataclass(frozen=True)
class Translated:
    """A tensor of the file.

    Attributes:
        entry: it, of the source's type, or of F32.
        hub_name: of (the first of) what it is made of.
        is_projection: it may be rounded.
        take: it.
    """

    entry: Entry
    hub_name: str
    is_projection: bool
    take: Take


@dataclass(frozen=True)
class _Piece:
    """What a tensor of the folder, or a slice of one, brings to a slot.

    Attributes:
        parts: of the slot, "*" for the number of an expert.
        expert: that number, −1 = it is of none.
    """

    entry: Entry
    parts: tuple[str, ...]
    expert: int
    take: Take


def translated(source: Source) -> list[Translated]:
    """
    Raises:
        ModelError: a tensor that the GGUF form of this family has no name for.
    """
    slots: dict[tuple[str, str], list[_Piece]] = {}
    for name in source.tensors:
        for entry, take in _slices(source, name):
            place = place_of(entry.name, source.names)
            if place is None:
                if not is_ignored(entry.name, source.names, source.card.num_layers):
                    raise _nameless(entry.name)
                continue
            if place.module == "head" and source.card.tie_embeddings:
                continue
            parts, expert = _expert_of(place.parts)
            pieces = slots.setdefault((place.module, place.slot), [])
            pieces.append(_Piece(entry, parts, expert, take))
    found: list[Translated] = []
    for (module, slot), pieces in slots.items():
        for name, mine in _named(module, slot, pieces, source.gguf_names):
            found.append(_joined(name, module, slot, mine, source))
    return found


def _slices(source: Source, name: str) -> Iterator[tuple[Entry, Take]]:
    tensor, slices = source.tensors[name], source.slices(name)
    if not slices:
        yield Entry(name, tensor.type, tensor.shape), lambda: source.weight(name)
    for each in slices:
        entry = Entry(each.name, tensor.type, each.shape)
        yield entry, lambda each=each: each.take(source.weight(name))


def _expert_of(parts: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """ "gate3" -> "gate*", 3."""
    stems = [part.rstrip("0123456789") for part in parts]
    numbers = {part[len(stem) :] for part, stem in zip(parts, stems, strict=True)}
    if len(numbers) != 1 or numbers == {""}:
        return parts, -1
    return tuple(f"{stem}*" for stem in stems), int(numbers.pop())


def _named(
    module: str, slot: str, pieces: Sequence[_Piece], names: NameMap
) -> Iterator[tuple[str, list[_Piece]]]:
    """The tensors of the file that these pieces make, each with its own, in order."""
    left = {piece.parts: piece for piece in pieces}
    by_parts: dict[tuple[str, ...], list[_Piece]] = {}
    for piece in pieces:
        by_parts.setdefault(piece.parts, []).append(piece)
    numbers = split_numbers(module)[1]
    for template in names.modules:
        if not left or template.count("{}") != len(numbers):
            continue
        bare = template.format(*numbers)
        # A file's tensors are weights and biases; what else a slot may be called has a whole name.
        for name in (bare, *([f"{bare}.{slot}"] if slot in ("weight", "bias") else [])):
            place = place_of(name, names)
            if place is None or (place.module, place.slot) != (module, slot):
                continue
            covering = _cover(place.parts, left)
            if covering:
                yield name, [piece for parts in covering for piece in by_parts[parts]]
                left = {parts: piece for parts, piece in left.items() if parts not in covering}
    if left:
        raise _nameless(next(iter(left.values())).entry.name)


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


def _joined(
    name: str, module: str, slot: str, pieces: Sequence[_Piece], source: Source
) -> Translated:
    first = pieces[0].entry
    ordered = sorted(pieces, key=lambda piece: piece.expert)
    takes = [_turned(piece, module, source) for piece in ordered]
    shape = first.shape
    if ordered[0].expert >= 0:
        _check_experts(name, ordered)
        shape = (len(ordered), *shape)
    elif len(ordered) > 1:
        shape = (sum(piece.entry.shape[0] for piece in ordered), *shape[1:])
    if module.endswith(".shared_gate") and shape[0] == 1:
        shape = shape[1:]
    offset = source.names.norm_offset - source.gguf_names.norm_offset
    is_norm = module.rpartition(".")[2].endswith("norm")
    plus = offset if is_norm and slot == "weight" else 0.0
    is_projection = source.is_projection(first)
    is_small = len(shape) == 1 or not (is_projection or module in ("embedding", "head"))
    is_small = is_small or slot != "weight"

    def take() -> StoredWeight:
        parts = [each() for each in takes]
        whole = parts[0]
        if len(parts) > 1:
            raw = torch.cat([part.raw.reshape(-1) for part in parts])
            whole = StoredWeight.from_bytes(parts[0].type, shape, raw)
        whole = StoredWeight.from_bytes(whole.type, shape, whole.raw.reshape(-1).contiguous())
        return StoredWeight.from_tensor(whole.dense.float() + plus) if is_small else whole

    entry = Entry(name, "F32" if is_small else first.type, shape)
    return Translated(entry, first.name, is_projection and not is_small, take)


def _check_experts(name: str, ordered: Sequence[_Piece]) -> None:
    found = [piece.expert for piece in ordered]
    if found != list(range(len(found))):
        raise ModelError(
            f"{name} is to hold {len(found)} experts, and their numbers go up to {found[-1]}",
            hint="a file of the checkpoint is missing",
        )


def _turned(piece: _Piece, module: str, source: Source) -> Take:
    """Rows of queries and keys in the order of the file: halves of a head become pairs."""
    place = f"{split_numbers(module)[0]}:{'+'.join(piece.parts)}"
    is_paired, becomes_paired = place in source.names.paired, place in source.gguf_names.paired
    if is_paired == becomes_paired:
        return piece.take
    card = source.card
    if is_paired or card.rotary_dim or card.latent is not None:
        raise ModelError(
            f"the rows of {printable(piece.entry.name)} are not brought into a GGUF file's order",
            hint="choose one of the types that folders have",
        )
    head_dim = card.head_dim

    def take() -> StoredWeight:
        mine = piece.take()
        row_bytes = mine.raw.numel() // mine.shape[0]
        halves = mine.raw.reshape(-1, 2, head_dim // 2, row_bytes)
        return StoredWeight(mine.type, mine.shape, halves.transpose(1, 2).reshape(mine.raw.shape))

    return take


def _nameless(name: str) -> ModelError:
    return ModelError(
        f"the GGUF form of this family has no name for {printable(name)}",
        hint="choose one of the types that folders have",
    )
