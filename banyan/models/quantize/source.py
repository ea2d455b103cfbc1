"""The checkpoint to quantise: its tensors by name, in file order, and slices of stacked experts (in
a quantised folder each expert is a module of its own)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

from torch import Tensor

from banyan.families import FAMILIES
from banyan.families.names import NameMap
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import MappedFile, TensorInfo
from banyan.formats.shards import files_of_weights, open_weight_file
from banyan.model_config.model_config import ModelConfig
from banyan.models.quantize.layouts import HeaderEntry
from banyan.models.weights.checkpoint_layouts import halves_of
from banyan.models.weights.names import is_projection, place_of, split_numbers
from banyan.models.weights.reader import as_tensor
from banyan.ops.stored import STORAGE_TYPES, StoredWeight


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


class SourceCheckpoint:
    """One checkpoint; holds at most one of its files open.

    Attributes:
        tensors: by name, in the order of files and places.
        names: of the checkpoint's own form.
    """

    def __init__(self, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self.names: NameMap = FAMILIES.load(model_config.architecture).names[model_config.format]
        self._files: dict[str, Path] = {}
        self._open: MappedFile | None = None
        self._opened: Path | None = None
        self.tensors: dict[str, TensorInfo] = {}
        for path in files_of_weights(model_config.path):
            file = self._file(path)
            for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
                if tensor.name in self.tensors:
                    first = self._files[tensor.name].name
                    raise file.error(f"tensor {tensor.name!r} is also in {first}")
                self.tensors[tensor.name] = tensor
                self._files[tensor.name] = path

    def is_projection(self, entry: HeaderEntry) -> bool:
        """Whether a tensor, or a slice of one, is the matrix of a projection within a layer that
        answers."""
        if entry.type not in STORAGE_TYPES:
            return False
        return is_projection(entry.name, entry.shape, self.names, self.model_config.num_layers)

    def slices(self, name: str) -> list[Slice]:
        """What modules of their own take of a tensor that holds all experts of a layer; none when
        it does not, or holds no weights."""
        tensor = self.tensors[name]
        if tensor.type not in STORAGE_TYPES:
            return []
        return slices_of(name, tensor.shape, self.names)

    @property
    def is_gguf(self) -> bool:
        return self.model_config.format == "gguf"

    @property
    def other_names(self) -> NameMap:
        """Of the same model in a GGUF file, or of a GGUF file's in a folder."""
        form = "safetensors" if self.is_gguf else "gguf"
        return FAMILIES.load(self.model_config.architecture).names[form]

    def weight(self, name: str) -> StoredWeight:
        tensor = self.tensors[name]
        return StoredWeight.from_bytes(tensor.type, tensor.shape, self.octets(name))

    def octets(self, name: str) -> Tensor:
        """The bytes of a tensor, [size] uint8; they alias the mapped file."""
        return as_tensor(self._file(self._files[name]).bytes_of(name))

    def pairs(self) -> dict[str, bytes]:
        """Of a GGUF file: its metadata by key, as it lies in the file."""
        with GGUFFile.open(self.model_config.path) as file:
            return file.pairs()

    def files_state(self) -> list[tuple[str, int, int]]:
        """Names, sizes and times of the files, to detect changes."""
        found = [(path, path.stat()) for path in dict.fromkeys(self._files.values())]
        return [(path.name, facts.st_size, facts.st_mtime_ns) for path, facts in found]

    def _file(self, path: Path) -> MappedFile:
        if self._open is None or self._opened != path:
            self.close()
            opened = GGUFFile.open(str(path), has_words=False) if self.is_gguf else None
            self._open = opened or open_weight_file(str(path))
            self._opened = path
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def slices_of(name: str, shape: Sequence[int], names: NameMap) -> list[Slice]:
    """The modules whose weights or biases a tensor stacks; none if it is no stack, or the family
    has no names for single experts."""
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
