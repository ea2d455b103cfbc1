"""Table: the one way to register alternatives. Names map to "module:attribute", imported on use."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

from banyan.base.errors import ConfigError
from banyan.base.torch_parts import complete_torch

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
        return found + [e.name for e in self._from_packages() if e.name not in found]

    def load(self, name: str) -> T:
        """Import and return the entry called `name`; ConfigError lists the choices when unknown."""
        if name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            return getattr(import_module(module), attribute)
        for entry in self._from_packages():
            if entry.name == name:
                complete_torch()
                return entry.load()
        raise ConfigError(
            f"unknown {self.kind} {name!r}", hint=f"choose one of: {', '.join(self.names())}"
        )

    def _from_packages(self) -> "Iterable[EntryPoint]":
        if not self._plugins:
            return ()
        from importlib.metadata import entry_points  # a tenth of what a server's process imports

        return entry_points(group=self._plugins)
