"""Functions of the operator, named "module:function" (or "module.function") in a flag.

They come from the Python path, never from a checkpoint. Loading one runs the code of its module.
"""

import os
from collections.abc import Callable
from importlib import import_module

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.base.torch_parts import complete_torch

PATTERN = r"[A-Za-z_][\w.]*[:.][A-Za-z_]\w*"
"""Regular expression for such a name."""


def split_name(name: str) -> tuple[str, str]:
    """(module, function) of a name."""
    module, _, function = name.rpartition(":" if ":" in name else ".")
    return module, function


def load_named(flag: str, name: str, checkpoint: str) -> Callable[..., object]:
    """Import a function.

    Raises:
        ConfigError: it is missing, not callable, or in the folder of the checkpoint.
    """
    module_name, function_name = split_name(name)
    label = f"{flag} {printable(name)}"
    complete_torch()
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{label}: cannot be imported: {printable(str(error))}",
            hint="name it module:function, with the module on the Python path",
        ) from None
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(
            f"{label}: its module fails with {type(error).__name__}: {printable(str(error))}"
        ) from error
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
    return function


def _lies_in(file: str, checkpoint: str) -> bool:
    folder = checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint)
    code, folder = os.path.realpath(file), os.path.realpath(folder)
    return bool(file) and os.path.commonpath([code, folder]) == folder
