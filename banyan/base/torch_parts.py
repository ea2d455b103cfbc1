"""A part of torch that takes a quarter of its import and that few programs use: the kernels of
tensors without memory (its `meta` device), which say what shapes ops give.

Compilers, traces and such tensors need them; kernels, ours and torch's own, do not. So an engine's
process imports torch without them, and whoever may need them has them brought.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType

_PART = "torch._meta_registrations"
_BACKENDS = "torch.backends"
"""Entry points of packages that torch imports at the end of its own import. They may add to what
they find there."""


class _StandIn(ModuleType):
    """What torch finds in the place of the part. Who asks it for anything gets the part itself."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        _let_go(self)
        return getattr(import_module(_PART), name)


@contextmanager
def without_meta_kernels() -> Generator[None]:
    """Import torch inside: its part is left out until `complete_torch`. Nothing is left out where
    torch is here already, or imports packages for other devices by itself."""
    if "torch" in sys.modules or entry_points(group=_BACKENDS):
        yield
        return
    stand_in = _StandIn(_PART)
    sys.modules[_PART] = stand_in
    try:
        yield
    finally:
        _let_go(stand_in)


def complete_torch() -> None:
    """Bring what was left out, if anything was; a third of a second. For meta tensors, and before
    code that is not ours runs beside torch, which may ask for anything."""
    if "torch" in sys.modules and find_spec(_PART) is not None:
        import_module(_PART)


def _let_go(stand_in: ModuleType) -> None:
    package, _, name = _PART.rpartition(".")
    if sys.modules.get(_PART) is stand_in:
        del sys.modules[_PART]
    parent = sys.modules.get(package)
    if parent is not None and vars(parent).get(name) is stand_in:
        delattr(parent, name)
