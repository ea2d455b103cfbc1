"""World: what happens next in simulated time. An event is a time and a function."""

from collections.abc import Callable
from heapq import heappop, heappush

from banyan.base.clock import VirtualClock


class World:
    """Event heap over a virtual clock. Events of one time happen in the order they were planned."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Plan an event; a time in the past means at once."""
        self._planned += 1
        heappush(self._events, (max(when_s, self.clock.now()), self._planned, happen))

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen that is planned up to `until_s`."""
        while self._events and self._events[0][0] <= until_s:
            when_s, _, happen = heappop(self._events)
            self.clock.advance_to(when_s)
            happen()
