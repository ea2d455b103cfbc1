"""Chunks: a growing answer that its reader takes without waiting, or iterates.

A reader registers a callback (`on_more`) that runs in the call that brings more. So a token needs
no task switch. `async for` is for readers that prefer to wait.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Chunks(ABC, Generic[T]):
    """The owner closes it; closing before the end aborts the source. All calls come from one event
    loop."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Everything was taken, and nothing will arrive."""

    @property
    def is_quiet(self) -> bool:
        """Whether `take` would certainly return None, so that the call can be spared."""
        return False

    @abstractmethod
    def take(self) -> T | None:
        """The next part of what has arrived; None if there is nothing new."""

    @abstractmethod
    def on_more(self, more: Callable[[], None] | None) -> None:
        """Replace the callback that runs when there may be something to take after `take` returned
        None. It must not raise. None = no callback."""

    @abstractmethod
    def close(self) -> None:
        """Release it; a second call does nothing."""

    def __aiter__(self) -> "Chunks[T]":
        return self

    async def __anext__(self) -> T:
        while (found := self.take()) is None:
            if self.is_over:
                raise StopAsyncIteration
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_more(partial(_wake, more))
            try:
                await more
            finally:
                self.on_more(None)
        return found

    async def aclose(self) -> None:
        self.close()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class WrappedChunks(Chunks[T]):
    """Base class of chunks that forward another stream, `inner`."""

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

    def on_more(self, more: Callable[[], None] | None) -> None:
        self.inner.on_more(more)

    def close(self) -> None:
        self.inner.close()
