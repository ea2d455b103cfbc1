"""A list of token ids in a file: what a draft model may draft. Knows no vocabulary.

Three forms are read, none of which can run anything: safetensors, JSON, and numpy's .npy.
"""

import json
import os

import numpy as np

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.formats.arrays import read_arrays

_MOST_BYTES = 64 << 20
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
        size = os.path.getsize(path)
        if size > _MOST_BYTES:
            raise ConfigError(f"{name} has {size:,} bytes; at most {_MOST_BYTES:,} are read")
        found = _read(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {printable(str(error), 120)}") from None
    if found is None:
        raise ConfigError(
            f"{name} holds no list of token ids",
            hint="write one list of whole numbers, as FILE.json, FILE.npy or FILE.safetensors",
        )
    return found


def _read(path: str) -> list[int] | None:
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        ids = [each for each in value if type(each) is int] if is_list(value) else []
        return ids if is_list(value) and len(ids) == len(value) else None
    if path.endswith(".npy"):
        array = np.load(path, allow_pickle=False)
    elif path.endswith(".safetensors"):
        arrays = list(read_arrays(path).values())
        array = arrays[0] if len(arrays) == 1 else np.empty(0)
    else:
        return None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        return None
    return [int(each) for each in array]
