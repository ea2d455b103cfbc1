"""Functions of the user's own that change what a checkpoint holds before the model takes it.

They are named "module:function" (or "module.function"), come from the Python path, and never from
the checkpoint. Each takes the checkpoint's tensors, (name, StoredWeight) one after another, and
yields what the model shall see instead; the loader's account then holds for that.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import cast

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.models.weights.quant.base import Stored

Tensors = Iterator[tuple[str, Stored]]
Transform = Callable[[Tensors], Tensors]


def load_transforms(names: Sequence[str], checkpoint: str) -> list[Transform]:
    """Import the functions, in order.

    Raises:
        ConfigError: one is missing, cannot be called, or lies in the folder of the checkpoint.
    """
    return [_load(name, checkpoint) for name in names]


def _load(name: str, checkpoint: str) -> Transform:
    module_name, _, function_name = name.rpartition(":" if ":" in name else ".")
    label = f"--custom-weight-loader {printable(name)}"
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{label}: cannot be imported: {printable(str(error))}",
            hint="name it module:function, with the module on the Python path",
        ) from None
    if _lies_in(getattr(module, "__file__", None) or "", checkpoint):
        raise ConfigError(
            f"{label}: its code lies with the checkpoint, and code of a checkpoint is never run",
            hint="install it as a package of its own",
        )
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{label}: {module_name} has no function {printable(function_name)!r}",
            hint="name it module:function",
        )
    return cast(Transform, function)


def _lies_in(file: str, checkpoint: str) -> bool:
    folder = checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint)
    code, folder = os.path.realpath(file), os.path.realpath(folder)
    return bool(file) and os.path.commonpath([code, folder]) == folder
