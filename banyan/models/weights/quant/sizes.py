"""Estimates the memory of a quantised checkpoint's weights before loading: restores one weight of
each kind with the form's method."""

import math
from collections.abc import Mapping
from pathlib import Path

from banyan.families.nested import NESTED
from banyan.formats.gguf import KEPT_BYTES, kept_bytes
from banyan.formats.mapped import TensorInfo
from banyan.formats.shards import files_of_weights, open_weight_file
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.names import split_numbers
from banyan.models.weights.quant import open_method
from banyan.models.weights.quant.base import CACHE_SCALES, QuantMethod, Stored
from banyan.models.weights.reader import as_stored, as_tensor
from banyan.ops.stored import E4M3, NVFP4, STORAGE_TYPES

_Where = Mapping[str, tuple[Path, TensorInfo]]
_Kind = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]
"""A kind of quantised weight: name without numbers, and type and shape of each of its tensors."""


def kept_size_of_folder(
    model_config: ModelConfig, keeps_fp8: bool, rounded_to: str = "", keeps_fp4: bool = False
) -> int:
    """Bytes of all weights in memory.

    Args:
        keeps_fp8: the device multiplies with floats of 8 bits.
        keeps_fp4: its experts multiply with NVFP4.
        rounded_to: storage type that floats of quantised weights are rounded to, "" = none.

    Raises:
        ModelError: files are missing or damaged, or a weight is not what the form says.
    """
    assert model_config.quant is not None
    method = open_method(model_config.quant, model_config.path)
    where = _found(model_config.path)
    stems: dict[str, dict[str, str]] = {}
    size = 0
    nested = NESTED.get(model_config.outer)
    for name, (_, tensor) in where.items():
        if nested is not None and nested.text_name(name) is None:
            continue
        if name.rpartition(".")[2] in CACHE_SCALES:
            continue
        place = method.part_of(name, tensor.type)
        if place is None:
            size += tensor.size_bytes
        else:
            stems.setdefault(place[0], {})[place[1]] = name
    known: dict[_Kind, int] = {}
    floats = rounded_to or (E4M3 if keeps_fp8 else "")
    for stem, parts in stems.items():
        found = [(last, where[name][1]) for last, name in sorted(parts.items())]
        kind = split_numbers(stem)[0], tuple((last, t.type, t.shape) for last, t in found)
        if kind not in known:
            known[kind] = _kept(method, stem, parts, where, floats, keeps_fp4)
        size += known[kind]
    return size


def _found(path: str) -> _Where:
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for file in files_of_weights(path):
        with open_weight_file(str(file)) as opened:
            found |= {name: (file, tensor) for name, tensor in opened.tensors.items()}
    return found


def _kept(
    method: QuantMethod,
    stem: str,
    parts: Mapping[str, str],
    where: _Where,
    floats: str,
    keeps_fp4: bool,
) -> int:
    """Bytes of one weight, restored as it is when it is loaded.

    Args:
        floats: storage type that floats are rounded to; E4M3 = 8-bit floats stay as they are, "" =
            8-bit floats become bf16.
    """
    read: dict[str, Stored] = {}
    for last, name in parts.items():
        file, tensor = where[name]
        with open_weight_file(str(file)) as opened:
            raw = as_tensor(opened.bytes_of(name)).clone()
            read[last] = as_stored(name, tensor.type, tensor.shape, raw)
    restored = method.restore(stem, read)
    bias = restored.bias.raw.numel() if restored.bias is not None else 0
    weight, type = restored.weight, restored.weight.type
    if (type == E4M3 and not floats) or (type == NVFP4 and not keeps_fp4):
        return bias + 2 * math.prod(weight.shape)
    if floats != E4M3 and (STORAGE_TYPES[type].is_float or type == E4M3):
        type = floats or type
    return bias + (kept_bytes(type, weight.shape) if type in KEPT_BYTES else weight.raw.numel())
