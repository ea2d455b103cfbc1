"""Banyan serves large language models. `banyan.Engine` is the offline API (see llm.py)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from banyan.llm import Engine

__version__ = "0.1.0"

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> "type[Engine]":
    # Loaded on first use, so that importing one room does not import the whole house.
    if name == "Engine":
        from banyan.llm import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
