"""SGLang's module names, served by Banyan. `sglang.Engine` is `banyan.Engine`."""

from importlib.metadata import distributions
from typing import TYPE_CHECKING

from banyan import __version__

if TYPE_CHECKING:
    from banyan import Engine

__all__ = ["Engine", "__version__"]

_REAL = {"sglang", "sglang-router"}


def _check_alone() -> None:
    for each in distributions():
        name = (each.metadata["Name"] or "").lower().replace("_", "-")
        if name in _REAL:
            raise ImportError(
                f"{name} {each.version} and banyan-serve-sglang have the same modules; "
                f"uninstall one of them (pip uninstall banyan-serve-sglang)"
            )


_check_alone()


def __getattr__(name: str) -> "type[Engine]":
    if name == "Engine":
        from banyan import Engine

        return Engine
    raise AttributeError(
        f"sglang.{name} is not served by Banyan; sglang.Engine and the modules are"
    )
