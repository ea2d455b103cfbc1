"""Logit processors that installed packages offer, by name. Requests name them; code never comes
with a request. The front lists them, the runner imports what is named.
"""

from collections.abc import Callable

from banyan.base.table import Table

LOGIT_PROCESSORS: Table[Callable[..., object]] = Table(
    "logit processor", {}, plugins="banyan.logit_processors"
)
"""Of the type runner.sampling.processors.LogitProcessor."""
