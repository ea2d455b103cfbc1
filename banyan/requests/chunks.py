"""Chunks: a growing answer, taken by whoever reads it, when it can.

A reader takes what is there without waiting, and is told in the very call that brings more. So a
token costs no task its turn; who would rather wait iterates. Knows nothing of what is taken.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Chunks(ABC, Generic[T]):
    """Whoever has it closes it; closing before the end aborts what brings more. All calls from one
    event loop."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Nothing is there, and nothing will come."""

    @property
    def is_quiet(self) -> bool:
        """Whether it is certain that `take` would give None, though it is not over: then nobody has
        to ask."""
        return False

    @abstractmethod
    def take(self) -> T | None:
        """What is there and was not taken before; None when that is nothing. Where it is not all,
        the next call gives more."""

    @abstractmethod
    def tell(self, more: Callable[[], None] | None) -> None:
        """Call `more`, and nobody else, whenever there may be something to take after `take` gave
        None. It must not raise. None = nobody."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; a second time does nothing."""

    def __aiter__(self) -> "Chunks[T]":
        return self

    async def __anext__(self) -> T:
        while (found := self.take()) is None:
            if self.is_over:
                raise StopAsyncIteration
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.tell(partial(_ring, more))
            try:
                await more
            finally:
                self.tell(None)
        return found

    async def aclose(self) -> None:
        self.close()


def _ring(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


class Through(Chunks[T]):
    """Chunks that are looked at on their way.

    Args:
        inner: where they come from.
    """

    def __init__(self, inner: Chunks[T]) -> None:
        self.inner = inner

    @property
    def is_over(self) -> bool:
        return self.inner.is_over

    @property
    def is_quiet(self) -> bool:
        return self.inner.is_quiet

    def take(self) -> T | None:
        return self.inner.take()

    def tell(self, more: Callable[[], None] | None) -> None:
        self.inner.tell(more)

    def close(self) -> None:
        self.inner.close()
