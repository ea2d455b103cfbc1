"""SharedProbe: one question at a time, however many ask it. Knows neither question nor askers."""

import asyncio
from collections.abc import Awaitable, Callable

from banyan.base.clock import Clock, WallClock

HOLDS_S = 1.0
"""How long a good answer is given again without asking."""


class SharedProbe:
    """Asks on behalf of everybody who waits, so that strangers cannot make it ask more often."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._asking: asyncio.Task[None] | None = None
        self._good_until_s = 0.0

    async def ask(self, question: Callable[[], Awaitable[None]]) -> None:
        """Return when the question was answered, or raise what it raised."""
        if self._clock.now() < self._good_until_s:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(question))
        await asyncio.shield(self._asking)

    async def _ask(self, question: Callable[[], Awaitable[None]]) -> None:
        await question()
        self._good_until_s = self._clock.now() + HOLDS_S
