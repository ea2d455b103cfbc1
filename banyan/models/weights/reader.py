"""Reads the tensors of a checkpoint one after another, from safetensors or GGUF files.

Bytes stay in the mapped file until a layer packs them. User functions (--custom-weight-loader) may
change the tensors: each takes (name, StoredWeight) pairs and yields what the model should load.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.memory import give_back
from banyan.base.table import load_named
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import MappedFile, TensorInfo
from banyan.formats.shards import open_weight_file, weight_files
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import RAW_TYPES, RawTensor, StoredWeight

_PART, _LEAST, _MOST = 64, 4 << 20, 256 << 20
"""Memory of what was read and already packed is returned to the system after this fraction of a
checkpoint, and at least and at most this many bytes."""


def read_tensors(model_config: ModelConfig, is_mapped: bool = True) -> Iterator[tuple[str, Stored]]:
    """Every tensor of the checkpoint, by file and offset, except that tensors outside layers come
    first, and tensors of one module come together at the offset of the largest. (Files store their
    widest types first, so scales of 4-bit weights may otherwise follow the weights of all layers.)

    A tensor is valid until the iterator moves to the next file, unless the caller keeps it (the
    mapping then stays with it).

    Args:
        is_mapped: False reads each file into memory instead of mapping it.

    Raises:
        ModelError: missing or damaged files, a tensor in two files or in none.
    """
    opened: Callable[[str, bool], MappedFile] = (
        partial(GGUFFile.open, has_words=False)
        if model_config.format == "gguf"
        else open_weight_file
    )
    seen: dict[str, str] = {}
    files = _files(model_config)
    size, read = sum(path.stat().st_size for path in files if path.is_file()), 0
    at_once = min(max(size // _PART, _LEAST), _MOST)
    for path in files:
        with ExitStack() as stack:
            file = stack.enter_context(opened(str(path), is_mapped))
            for tensor in _by_module(file.tensors.values()):
                if tensor.name in seen:
                    raise ModelError(
                        f"tensor {tensor.name!r} is in both {seen[tensor.name]} and {path.name}"
                    )
                seen[tensor.name] = path.name
                raw = as_tensor(file.bytes_of(tensor.name))
                yield tensor.name, as_stored(tensor.name, tensor.type, tensor.shape, raw)
                read += tensor.size_bytes
                if read >= at_once:
                    read = 0
                    file.let_go()
                    give_back()


def _by_module(tensors: Collection[TensorInfo]) -> list[TensorInfo]:
    """Tensors outside layers first: the head is often by far the largest weight, and while it is
    packed it is in memory twice."""
    places: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        module = tensor.name.rpartition(".")[0]
        place = (tensor.size_bytes, tensor.offset)
        places[module] = max(places.get(module, place), place)

    def key(tensor: TensorInfo) -> tuple[bool, int, int]:
        module = tensor.name.rpartition(".")[0]
        is_of_a_layer = any(part.isdecimal() for part in module.split("."))
        return is_of_a_layer, places[module][1], tensor.offset

    return sorted(tensors, key=key)


def tensor_types(model_config: ModelConfig) -> dict[str, str]:
    """The type of every tensor of the checkpoint by name; reads headers only.

    Raises:
        ModelError: as `read_tensors`.
    """
    types: dict[str, str] = {}
    for path in _files(model_config):
        with open_weight_file(str(path)) as file:
            types |= {name: tensor.type for name, tensor in file.tensors.items()}
    return types


def files_state_of(model_config: ModelConfig) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a checkpoint, to detect changes.

    Raises:
        ModelError: as `read_tensors`.
    """
    found = [(path, path.stat()) for path in _files(model_config)]
    return [(str(path), facts.st_size, facts.st_mtime_ns) for path, facts in found]


def as_stored(name: str, type: str, shape: tuple[int, ...], raw: Tensor) -> Stored:
    """A tensor of a checkpoint from its bytes, [size] uint8."""
    if type in RAW_TYPES:
        return RawTensor(type, shape, raw)
    try:
        return StoredWeight.from_bytes(type, shape, raw)
    except ModelError as error:
        raise ModelError(f"tensor {name!r}: {error.text}", error.hint) from None


def as_tensor(view: memoryview) -> Tensor:
    """The bytes as [size] uint8 without a copy."""
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # The buffer is read-only and so is our use of it; torch has no read-only tensors.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


def _files(model_config: ModelConfig) -> list[Path]:
    path = Path(model_config.path)
    return [path] if path.is_file() else weight_files(model_config.path)


Tensors = Iterator[tuple[str, Stored]]
Transform = Callable[[Tensors], Tensors]


def load_transforms(names: Sequence[str], checkpoint: str) -> list[Transform]:
    """Import the functions of --custom-weight-loader, in order.

    Raises:
        ConfigError: one is missing, cannot be called, or is in the checkpoint's folder.
    """
    return [cast(Transform, load_named("--custom-weight-loader", n, checkpoint)) for n in names]
