"""Code that is found by its name: tables of alternatives, and functions that a flag names.

A `Table` is the one way to register alternatives. Functions of the operator ("module:function" or
"module.function") come from the Python path, never from a checkpoint. Loading one runs the code of
its module.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Generic, TypeVar

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.base.torch_parts import complete_torch

T = TypeVar("T")

PATTERN = r"[A-Za-z_][\w.]*[:.][A-Za-z_]\w*"
"""Regular expression for such a name."""


class Table(Generic[T]):
    """Lazy registry of one kind of thing.

    Args:
        kind: what an entry is, for messages ("attention backend").
        entries: name -> "package.module:attribute".
        plugins: entry-point group whose installed packages may add names; "" for none.
    """

    def __init__(self, kind: str, entries: Mapping[str, str], plugins: str = "") -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._plugins = plugins

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        found = list(self._entries)
        if self._plugins:
            found += [e.name for e in plugins(self._plugins) if e.name not in found]
        return found

    def load(self, name: str) -> T:
        """Import and return the entry called `name`; ConfigError lists the choices when unknown."""
        if name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in plugins(self._plugins) if self._plugins else ():
            if entry.name == name:
                complete_torch()
                return entry.load()
        raise ConfigError(
            f"unknown {self.kind} {name!r}", hint=f"choose one of: {', '.join(self.names())}"
        )


def plugins(group: str) -> EntryPoints:
    """What installed packages add to a group of entry points."""
    return EntryPoints(e for e in _installed(tuple(sys.path)) if e.group == group)


@lru_cache(maxsize=1)  # it reads a file of each package, which takes 20 ms
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    groups = entry_points()
    return tuple(e for name in groups.groups for e in groups.select(group=name))


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
