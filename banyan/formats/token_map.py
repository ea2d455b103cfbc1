"""Reads a list of token ids from a file: the tokens that a draft model may draft.

Three formats are read; none can run code: safetensors, JSON, and numpy's .npy.
"""

import io
import json

import numpy as np

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.base.os import read_whole
from banyan.formats.arrays import read_arrays

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
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
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
