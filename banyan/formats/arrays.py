"""Arrays of numbers in a safetensors file: plain numbers with a name, a type and a shape.

What is read back is only ever numbers; nothing in such a file can run.
"""

import json
import os
from collections.abc import Mapping

import numpy as np

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
