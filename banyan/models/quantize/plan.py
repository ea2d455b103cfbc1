"""Plans a quantised checkpoint before any number is rounded: its files, and the result of every
tensor of the source. The same source and settings give the same plan."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from banyan.formats.mapped import TensorInfo
from banyan.models.quantize.layouts import (
    Floats,
    Header,
    HeaderEntry,
    Rounded,
    TargetLayout,
    gguf_header,
    gguf_pair,
    safetensors_header,
    size_in_gguf,
    size_in_safetensors,
    to_floats,
    without_keys,
)
from banyan.models.quantize.source import SourceCheckpoint
from banyan.models.quantize.translate import translated
from banyan.models.weights.names import split_numbers
from banyan.models.weights.quant.base import Modules
from banyan.ops.stored import STORAGE_TYPES, StoredWeight

_QUANTIZATION_VERSION = 2
_FILE_TYPES = {
    **{"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q4_K": 15, "Q5_K": 17, "Q6_K": 18},
}
"""Values of general.file_type: the most common type of the file (gguf-py constants)."""


@dataclass(frozen=True)
class PlanUnit:
    """One tensor of the source, or what a module takes of it.

    Attributes:
        entries: what it becomes.
        rounded: how; None when it is copied as it is.
        take: it, where it is not the tensor as it lies in the file.
    """

    source: str
    entries: tuple[HeaderEntry, ...]
    rounded: Rounded | None
    take: Callable[[], StoredWeight] | None = None


@dataclass(frozen=True)
class FilePiece:
    """A run of bytes of one file that is written at once, and made again when it is not whole.

    Attributes:
        head: what it begins with.
        offsets: of every entry of its units, in the file.
        start, end: in the file.
    """

    head: bytes
    units: tuple[PlanUnit, ...]
    offsets: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class OutFile:
    name: str
    pieces: tuple[FilePiece, ...]

    @property
    def size_bytes(self) -> int:
        return self.pieces[-1].end


@dataclass
class QuantizePlan:
    """
    Attributes:
        kinds: kind of rounding -> modules that are rounded so.
        floats: modules with a matrix that stays as it is.
        kept: why projections stay as they are -> how many.
    """

    files: list[OutFile] = field(default_factory=list)
    kinds: dict[str, list[str]] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def num_units(self) -> int:
        return sum(len(piece.units) for file in self.files for piece in file.pieces)


@dataclass(frozen=True)
class GGUFMetadata:
    """Metadata of a GGUF file that is made from a folder.

    Attributes:
        keys: its metadata.
        constants: tensors computed from the folder's configuration, first in the file.
    """

    keys: Mapping[str, object]
    constants: Mapping[str, Sequence[float]]


def make_plan(
    source: SourceCheckpoint,
    layout: TargetLayout,
    ignore: Sequence[str],
    most_bytes: int,
    name: str,
    words: GGUFMetadata | None = None,
) -> QuantizePlan:
    """Args:
    ignore: modules that stay unquantised, in addition to the usual ones.
    most_bytes: size limit of a file of a folder, or of a piece of a GGUF file that is written
        again after an interruption.
    name: of the GGUF file.
    words: metadata of a GGUF file from a folder; None = source and result have the same format.
    """
    plan = QuantizePlan()
    left_out = Modules(ignore, "--ignore")
    if words is not None:
        units = [*_constants(words), *_translated(plan, source, layout, left_out)]
        pairs = [gguf_pair(key, value) for key, value in words.keys.items()]
        plan.files.append(_gguf_file(name, pairs, units, most_bytes))
        return plan
    if source.is_gguf and layout.container == "safetensors":
        units = list(_of_folder(plan, source, layout, left_out))
    else:
        units = [
            unit for name in source.tensors for unit in _units(plan, source, layout, left_out, name)
        ]
    if layout.container == "gguf":
        own = ("general.quantization_version", "general.file_type", "general.alignment")
        pairs = without_keys(source.pairs(), *own)
        plan.files.append(_gguf_file(name, pairs, units, most_bytes))
        return plan
    shards = list(_shards(units, size_in_safetensors, most_bytes))
    for number, mine in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = safetensors_header(_entries(mine))
        whole = FilePiece(header.octets, tuple(mine), header.offsets, 0, header.size_bytes)
        plan.files.append(OutFile("model.safetensors" if len(shards) == 1 else shard, (whole,)))
    return plan


def _units(
    plan: QuantizePlan, source: SourceCheckpoint, layout: TargetLayout, left_out: Modules, name: str
) -> Iterator[PlanUnit]:
    tensor = source.tensors[name]
    slices = source.slices(name) if layout.container == "safetensors" else []
    if not slices:
        yield _unit(plan, source, layout, left_out, PlanUnit(name, (_as_it_is(tensor),), None))
    for each in slices:
        entry = HeaderEntry(each.name, tensor.type, each.shape)
        copied = PlanUnit(name, (entry,), None, lambda each=each: each.take(source.weight(name)))
        yield _unit(plan, source, layout, left_out, copied)


def _constants(words: GGUFMetadata) -> Iterator[PlanUnit]:
    for name, numbers in words.constants.items():
        entry = HeaderEntry(name, "F32", (len(numbers),))
        yield PlanUnit(name, (entry,), None, lambda n=numbers: StoredWeight.from_tensor(Tensor(n)))


def _translated(
    plan: QuantizePlan, source: SourceCheckpoint, layout: TargetLayout, left_out: Modules
) -> Iterator[PlanUnit]:
    """Of a GGUF file: small tensors are fp32, as its readers want them."""
    for each in translated(source):
        name, shape = each.entry.name, each.entry.shape
        copied = PlanUnit(each.hub_name, (each.entry,), None, each.take)
        if each.is_small:
            floats = to_floats(name, shape, "F32")
            copied = PlanUnit(each.hub_name, floats.entries, floats, each.take)
        yield _round(plan, layout, left_out, copied, each.is_projection, each.hub_name)


def _of_folder(
    plan: QuantizePlan, source: SourceCheckpoint, layout: TargetLayout, left_out: Modules
) -> Iterator[PlanUnit]:
    """Of a folder from a GGUF file: all that is not rounded are floats of one type, but for
    corrections of routers, whose bits matter."""
    dtype = float_type(source, layout)
    for each in translated(source, has_stacks=isinstance(layout, Floats)):
        name, shape = each.entry.name, each.entry.shape
        floats = to_floats(name, shape, "F32" if name.endswith("correction_bias") else dtype)
        copied = PlanUnit(name, floats.entries, floats, each.take)
        yield _round(plan, layout, left_out, copied, each.is_projection, name)


def float_type(source: SourceCheckpoint, layout: TargetLayout) -> str:
    """Float type of a folder made from a GGUF file: the layout's, otherwise the type of most
    matrices of the file; BF16 if these are in blocks."""
    if isinstance(layout, Floats):
        return layout.type
    kinds = Counter(tensor.type for tensor in source.tensors.values() if len(tensor.shape) > 1)
    most = kinds.most_common(1)[0][0] if kinds else ""
    return most if most in ("F32", "F16") else "BF16"


def _as_it_is(tensor: TensorInfo) -> HeaderEntry:
    return HeaderEntry(tensor.name, tensor.type, tensor.shape)


def _unit(
    plan: QuantizePlan,
    source: SourceCheckpoint,
    layout: TargetLayout,
    left_out: Modules,
    copied: PlanUnit,
) -> PlanUnit:
    (whole,) = copied.entries
    return _round(plan, layout, left_out, copied, source.is_projection(whole), whole.name)


def _round(
    plan: QuantizePlan,
    layout: TargetLayout,
    left_out: Modules,
    copied: PlanUnit,
    is_projection: bool,
    called: str,
) -> PlanUnit:
    """What becomes of a unit that may be rounded; `called` in the source, or as its folder does."""
    (whole,) = copied.entries
    name, stem = whole.name, called.removesuffix(".weight")
    is_matrix = called.endswith(".weight") and len(whole.shape) == 2
    if not is_projection or left_out.names_it(stem):
        if is_projection:
            plan.kept["named by --ignore"] += 1
        if is_matrix:
            plan.floats.append(stem)
        return copied
    rounded = layout.plan(name, whole.shape, whole.type)
    if rounded is None:
        plan.kept[f"of shape {list(whole.shape)}, which the form does not hold"] += 1
        if is_matrix:
            plan.floats.append(stem)
        return copied
    plan.kinds.setdefault(rounded.kind, []).append(stem)
    if rounded.entries == copied.entries:
        return copied
    return replace(copied, entries=rounded.entries, rounded=rounded)


def _entries(units: Sequence[PlanUnit]) -> list[HeaderEntry]:
    return [entry for unit in units for entry in unit.entries]


def _shards(
    units: Sequence[PlanUnit], size: Callable[[HeaderEntry], int], most_bytes: int
) -> Iterator[list[PlanUnit]]:
    shard, filled = list[PlanUnit](), 0
    for unit in units:
        needed = sum(size(entry) for entry in unit.entries)
        if shard and filled + needed > most_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(unit)
        filled += needed
    if shard:
        yield shard


def _gguf_file(
    name: str, pairs: Sequence[bytes], units: Sequence[PlanUnit], most_bytes: int
) -> OutFile:
    kinds = Counter(e.type for e in _entries(units) if not STORAGE_TYPES[e.type].is_float)
    main = kinds.most_common(1)[0][0] if kinds else ""
    own = [gguf_pair("general.quantization_version", _QUANTIZATION_VERSION)]
    own += [gguf_pair("general.file_type", _FILE_TYPES[main])] if main in _FILE_TYPES else []
    header = gguf_header([*pairs, *own], _entries(units))
    return OutFile(name, tuple(_pieces(header, units, most_bytes)))


def _pieces(header: Header, units: Sequence[PlanUnit], most_bytes: int) -> Iterator[FilePiece]:
    at, offsets = 0, header.offsets
    shards = list(_shards(units, size_in_gguf, most_bytes))
    for number, mine in enumerate(shards):
        count = len(_entries(mine))
        end = offsets[at + count] if number + 1 < len(shards) else header.size_bytes
        head, start = (b"", offsets[at]) if number else (header.octets, 0)
        yield FilePiece(head, tuple(mine), offsets[at : at + count], start, end)
        at += count


def targets(named: Sequence[str], others: Sequence[str]) -> list[str]:
    """Names or patterns that mean these modules and none of the others: one pattern for all layers
    where it can be."""
    elsewhere = {split_numbers(name)[0] for name in others}
    found: list[str] = []
    for name in named:
        template, numbers = split_numbers(name)
        is_shared = bool(numbers) and template not in elsewhere
        found.append(_pattern(template) if is_shared else name)
    return list(dict.fromkeys(found))


def _pattern(template: str) -> str:
    return "re:" + template.replace(".", r"\.").replace("{}", r"\d+") + "$"
