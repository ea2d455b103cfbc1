"""Table: the one way to register alternatives. Names map to "module:attribute", imported on use."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from banyan.base.errors import ConfigError
from banyan.base.torch_parts import complete_torch

T = TypeVar("T")


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
            found += [e.name for e in entry_points(group=self._plugins) if e.name not in found]
        return found

    def load(self, name: str) -> T:
        """Import and return the entry called `name`; ConfigError lists the choices when unknown."""
        if name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in entry_points(group=self._plugins) if self._plugins else ():
            if entry.name == name:
                complete_torch()
                return entry.load()
        raise ConfigError(
            f"unknown {self.kind} {name!r}", hint=f"choose one of: {', '.join(self.names())}"
        )
