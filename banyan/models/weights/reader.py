"""Reads the tensors of a checkpoint one after another, whatever files it is made of.

Knows formats and shards; knows no models. Bytes stay in the mapped file until a layer packs them.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.config.card import ModelCard
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import MappedFile
from banyan.formats.safetensors import SafetensorsFile
from banyan.ops.stored import StoredWeight

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20


def read_tensors(card: ModelCard) -> Iterator[tuple[str, StoredWeight]]:
    """Every tensor of the checkpoint, by file and place within the file.

    A tensor lives as long as its file is mapped: until the iterator has moved to the next file,
    unless the caller keeps it (the mapping then stays with it).

    Raises:
        ModelError: missing or damaged files, a tensor in two files or in none.
    """
    opened: Callable[[str], MappedFile] = (
        GGUFFile.open if card.format == "gguf" else SafetensorsFile.open
    )
    seen: dict[str, str] = {}
    for path in _files(card):
        with ExitStack() as stack:
            file = stack.enter_context(opened(str(path)))
            for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
                if tensor.name in seen:
                    raise ModelError(
                        f"tensor {tensor.name!r} is in both {seen[tensor.name]} and {path.name}"
                    )
                seen[tensor.name] = path.name
                raw = _as_tensor(file.bytes_of(tensor.name))
                yield tensor.name, _stored(tensor.name, tensor.type, tensor.shape, raw)


def _stored(name: str, type: str, shape: tuple[int, ...], raw: Tensor) -> StoredWeight:
    try:
        return StoredWeight.from_bytes(type, shape, raw)
    except ModelError as error:
        raise ModelError(f"tensor {name!r}: {error.text}", error.hint) from None


def _as_tensor(view: memoryview) -> Tensor:
    """The bytes as [size] uint8 without a copy."""
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # The buffer is read-only and so is our use of it; torch has no read-only tensors.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


def _files(card: ModelCard) -> list[Path]:
    path = Path(card.path)
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        return [path / name for name in _shards(index)]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ModelError(
            f"{card.path!r} holds no *.safetensors file",
            hint="name a .gguf file or a folder with safetensors weights",
        )
    return found


def _shards(index: Path) -> list[str]:
    """File names of the index, in order; only names within the same folder are taken."""
    size = index.stat().st_size
    if size > _MAX_INDEX_BYTES:
        raise ModelError(f"{index.name} has {size:,} bytes, limit {_MAX_INDEX_BYTES:,}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{index.name} has no readable weight_map") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index.name} names {name!r}, which is not a file of the same folder")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.name} names {name!r}, which is missing")
    return names
