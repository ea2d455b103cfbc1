"""What a router counts, whoever keeps it. Knows no library."""

from typing import Protocol


class Figures(Protocol):
    kind: str
    """Content type of `show`."""

    def ended(self, route: str, status: int, seconds: float) -> None:
        """A request has ended."""
        ...

    def retried(self, route: str) -> None:
        """A request was sent once more."""
        ...

    def broke_off(self, route: str) -> None:
        """A worker was lost in the middle of an answer that its client had begun to get."""
        ...

    def show(self) -> bytes: ...
