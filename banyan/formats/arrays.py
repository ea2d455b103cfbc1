"""Arrays of numbers in files: safetensors files, and lists of token ids.

numpy is needed here alone; safetensors.py is imported by processes that do without it.
"""

import io
import json
import os
from collections.abc import Mapping

import numpy as np

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.base.os import read_whole
from banyan.formats.safetensors import SafetensorsFile

_TYPES = {"i4": "I32", "i8": "I64", "f4": "F32", "f8": "F64"}
_KINDS = {name: kind for kind, name in _TYPES.items()}
_ALIGNMENT = 8


def write_arrays(path: str, arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Write a file whole or not at all.

    Args:
        arrays: of 4 or 8 byte whole numbers, or floats.
        facts: metadata texts.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, object] = {"__metadata__": dict(facts)}
    at = 0
    for name, array in arrays.items():
        places = [at, at + array.nbytes]
        kind = _TYPES[array.dtype.str.lstrip("<=")]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": places}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    part = f"{path}.part"
    with open(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
    os.replace(part, path)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of a file, copied; arrays of other types are skipped.

    Raises:
        ModelError: it is none, cut short, or not to be trusted.
    """
    file = SafetensorsFile.open(path)
    try:
        found: dict[str, np.ndarray] = {}
        for name, info in file.tensors.items():
            kind = _KINDS.get(info.type)
            if kind is not None:
                values = np.frombuffer(file.bytes_of(name), np.dtype(f"<{kind}"))
                try:
                    found[name] = values.reshape(info.shape).copy()
                except ValueError:  # an empty array whose other dimensions are too large
                    raise file.error(f"an array cannot have the shape {info.shape}") from None
        return found
    finally:
        file.close()


_MOST_BYTES = 64 << 20
_NPY = b"\x93NUMPY"
_PICKLED = (".pt", ".pth", ".bin", ".pkl")


def read_token_map(path: str, flag: str) -> list[int]:
    """The whole numbers of a file, in their order.

    Raises:
        ConfigError: it cannot be read, is too large, or holds something else; named by `flag`.
    """
    name = f"{flag} {printable(path)}"
    if path.endswith(_PICKLED):
        raise ConfigError(
            f"{name} is a pickle, which can run code when opened",
            hint="on a machine you trust with it, convert it once: python -c 'import sys, json, "
            "torch; json.dump(torch.load(sys.argv[1], weights_only=True).tolist(), "
            'open(sys.argv[2], "w"))\' FILE.pt FILE.json',
        )
    try:
        found = _read(path)
    except (OSError, ValueError, RecursionError, ModelError) as error:
        raise ConfigError(f"{name} cannot be read: {printable(str(error), 120)}") from None
    if found is None:
        raise ConfigError(
            f"{name} holds no list of token ids",
            hint="write one list of whole numbers, as FILE.json, FILE.npy or FILE.safetensors",
        )
    return found


def _read(path: str) -> list[int] | None:
    if path.endswith(".json"):
        value = json.loads(read_whole(path, _MOST_BYTES).decode())
        ids = [each for each in value if type(each) is int] if is_list(value) else []
        return ids if is_list(value) and len(ids) == len(value) else None
    if path.endswith(".npy"):
        array = _read_npy(read_whole(path, _MOST_BYTES))
    elif path.endswith(".safetensors"):
        arrays = list(read_arrays(path).values())
        array = arrays[0] if len(arrays) == 1 else np.empty(0)
    else:
        return None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return None
    return [int(each) for each in array]


def _read_npy(content: bytes) -> np.ndarray:
    """ValueError: it is none."""
    if not content.startswith(_NPY):
        raise ValueError("it is no .npy file")
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (
        Exception
    ) as error:  # its header is a Python expression, and numpy's reader raises any exception
        raise ValueError(f"{type(error).__name__}: {error}") from None
