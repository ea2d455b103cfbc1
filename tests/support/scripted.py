"""Chunks that an async generator of a test brings, for code that takes them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from typing import ParamSpec

from banyan.requests.generation import Chunks, TextChunk

P = ParamSpec("P")


class Scripted(Chunks[TextChunk]):
    """What `source` yields; it runs on when the chunk before was taken."""

    def __init__(self, source: AsyncGenerator[TextChunk, None]) -> None:
        self._waiting: deque[TextChunk] = deque()
        self._error: Exception | None = None
        self._room = asyncio.Event()
        self._more: Callable[[], None] | None = None
        self._task = asyncio.ensure_future(self._pump(source))

    async def _pump(self, source: AsyncGenerator[TextChunk, None]) -> None:
        try:
            async for chunk in source:
                self._room.clear()
                self._waiting.append(chunk)
                self._tell_more()
                await self._room.wait()
        except Exception as error:
            self._error = error
        finally:
            await source.aclose()
            asyncio.get_running_loop().call_soon(self._tell_more)

    def _tell_more(self) -> None:
        if self._more is not None:
            self._more()

    @property
    def is_over(self) -> bool:
        return not self._waiting and self._error is None and self._task.done()

    def take(self) -> TextChunk | None:
        if self._waiting:
            self._room.set()
            return self._waiting.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def on_more(self, more: Callable[[], None] | None) -> None:
        self._more = more

    def close(self) -> None:
        self._task.cancel()


def scripted(method: Callable[P, AsyncGenerator[TextChunk, None]]) -> Callable[P, Scripted]:
    """A `generate` written as an async generator."""

    @wraps(method)
    def generate(*args: P.args, **kwargs: P.kwargs) -> Scripted:
        return Scripted(method(*args, **kwargs))

    return generate
