"""Parts of torch that its import brings and serving never uses: a third of the time it takes.

Kernels of tensors without memory (the `meta` device), exporting, distributions, quantising and the
loading of training data are among them. An engine's process imports torch with stand-ins in their
place, which bring the part when anybody asks them for something, and whoever may need what a part
only does by being there has all of them brought.
"""

import linecache
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType

_PARTS = (
    "torch._meta_registrations",
    "torch._native",
    "torch._storage_docs",
    "torch._tensor_docs",
    "torch.autograd.functional",
    "torch.autograd.profiler",
    "torch.compiler",
    "torch.distributions",
    "torch.export",
    "torch.fft",
    "torch.linalg",
    "torch.masked",
    "torch.nn.attention",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.sparse",
    "torch.utils.data",
    "torch.xpu",
    "torchgen.model",
)
"""Modules that torch, as it is imported, only names or adds to."""
_BACKENDS = "torch.backends"
"""Entry points of packages that torch imports at the end of its own import. They may add to what
they find there."""


class _StandIn(ModuleType):
    """What torch finds in the place of a part. Who asks it for anything gets the part itself."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__path__"):
            raise AttributeError(name)
        _let_go(self)
        return getattr(import_module(self.__name__), name)


@contextmanager
def without_parts() -> Generator[None]:
    """Import torch inside: its parts are left out until they are imported, used or brought by
    `complete_torch`. Nothing is left out where torch is here already, or imports packages for other
    devices by itself."""
    if "torch" in sys.modules or entry_points(group=_BACKENDS):
        yield
        return
    stand_ins = {name: _StandIn(name) for name in _PARTS}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        linecache.clearcache()  # torch notes from where it is imported, with the text of all files
        for stand_in in stand_ins.values():
            _let_go(stand_in)


def complete_torch() -> None:
    """Bring what was left out, if anything was; half a second. For meta tensors, and before code
    that is not ours runs beside torch, which may rely on anything."""
    if "torch" in sys.modules:
        for name in _PARTS:
            if find_spec(name) is not None:
                import_module(name)


def _let_go(stand_in: _StandIn) -> None:
    """Whoever imports the part from here on imports it. What names it already, as torch does, has
    the stand-in until then."""
    if sys.modules.get(stand_in.__name__) is stand_in:
        del sys.modules[stand_in.__name__]
