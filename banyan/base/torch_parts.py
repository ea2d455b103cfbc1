"""Imports torch without the parts that serving never uses.

An engine process saves 28 MB of memory and 0.7 s of CPU time this way. While torch is imported,
placeholder modules stand in for these parts; the first use of a placeholder imports the real
module. Code of others that runs in the process gets all of torch (`complete_torch`).

Each torch release is tried by tests/base/test_torch_parts.py before it is added to
`TRIED_RELEASES`. With any other release torch is imported whole.
"""

import linecache
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from types import ModuleType

TRIED_RELEASES = ("2.13",)
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
"""Modules that torch's own import only names or adds to."""
_BACKENDS = "torch.backends"
"""Entry points of packages that torch imports at the end of its import; they may use any part."""


class _Placeholder(ModuleType):
    """A module in place of a part. Reading any attribute imports the part."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__path__"):
            raise AttributeError(name)
        _remove(self)
        return getattr(import_module(self.__name__), name)


@contextmanager
def without_parts() -> Generator[None]:
    """Import torch inside: its parts are left out until used, imported, or `complete_torch`.

    Nothing is left out if torch is imported already, if its release is untried, or if it imports
    packages for other devices by itself.
    """
    is_tried = version("torch").startswith(tuple(f"{release}." for release in TRIED_RELEASES))
    if "torch" in sys.modules or not is_tried or entry_points(group=_BACKENDS):
        yield
        return
    placeholders = {name: _Placeholder(name) for name in _PARTS}
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        linecache.clearcache()  # torch's import leaves the text of its source files there
        for placeholder in placeholders.values():
            _remove(placeholder)


def complete_torch() -> None:
    """Import the parts that were left out; half a second.

    Needed for meta tensors, and before code of others runs in the process.
    """
    if "torch" in sys.modules:
        for name in _PARTS:
            if find_spec(name) is not None:
                import_module(name)


def _remove(placeholder: _Placeholder) -> None:
    """Let the next import of the part import it. Names that torch has bound keep the
    placeholder."""
    if sys.modules.get(placeholder.__name__) is placeholder:
        del sys.modules[placeholder.__name__]
