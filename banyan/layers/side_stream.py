"""Work beside that of a step, on another stream of the device."""

from collections.abc import Callable
from typing import Protocol


class Lane(Protocol):
    """See `platform.base.Lane`."""

    def mark(self) -> object: ...

    def run(self, work: Callable[[], object], after: object) -> object: ...

    def wait(self, mark: object) -> None: ...
