"""The warm-ups by name. Loads none of them, so that their names are known at once.

Others come from installed packages (entry points of the group `banyan.warmups`).
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from banyan.base.table import Table
from banyan.config.schema import Config

if TYPE_CHECKING:
    from banyan.server.state import Service

WarmUp = Callable[["Service", Config], Awaitable[None]]

WARMUPS: Table[WarmUp] = Table(
    "warm-up",
    {
        "chunk": "banyan.server.lifecycle.warmup:fill_a_step",
        "constraint": "banyan.server.lifecycle.warmup:compile_a_constraint",
    },
    plugins="banyan.warmups",
)


def named_warmups(config: Config) -> list[str]:
    """What --warmups names, in its order."""
    names = [name.strip() for name in config.server.warmups.split(",")]
    return [name for name in names if name]
