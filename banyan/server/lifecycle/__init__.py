"""The warm-ups by name. Importing this table loads none of them, so `--help` stays quick."""

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
        "chunk": "banyan.server.lifecycle.startup:fill_a_step",
        "constraint": "banyan.server.lifecycle.startup:compile_a_constraint",
    },
    plugins="banyan.warmups",
)


def named_warmups(config: Config) -> list[str]:
    """The names in --warmups, in order."""
    names = [name.strip() for name in config.server.warmups.split(",")]
    return [name for name in names if name]
