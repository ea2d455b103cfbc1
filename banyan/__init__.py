"""Banyan serves large language models. `banyan.Engine` is the offline API (see llm.py)."""

from typing import TYPE_CHECKING

from banyan.base.install import VERSION as __version__

if TYPE_CHECKING:
    from banyan.llm import Engine

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> "type[Engine]":
    # Loaded on first use, so that importing one room does not import the whole house.
    if name == "Engine":
        from banyan.llm import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
