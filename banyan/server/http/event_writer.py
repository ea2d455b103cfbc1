"""Follow: events that are written in the very call that brings what they tell.

A step of the engine brings something to many streams. To wake a task for each of them takes longer
than to make its event, so tasks wait only where there is something to wait for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from banyan.requests.chunks import Chunks
from banyan.server.http.exchange import HttpExchange

T = TypeVar("T")

Later = Callable[[], Awaitable[bytes]]
"""Makes bytes, and has to wait for that."""


async def follow(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> None:
    """Begin a stream with the first chunk, and send what `frames` makes of each until they are
    over. Where the client's buffer is full, or `frames` has to wait, the chunks wait too."""
    async for first in chunks:
        await exchange.begin_events()
        made = frames(first)
        while made is not None:
            frame = made if isinstance(made, bytes) else await made()
            if frame:
                await exchange.event(frame)
            made = await _write_along(exchange, chunks, frames)


async def _write_along(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> bytes | Later | None:
    """Write until something has to be waited for, which is returned; None at the end."""
    until: asyncio.Future[bytes | Later | None] = asyncio.get_running_loop().create_future()

    def more() -> None:
        if until.done():
            return
        try:
            while (chunk := chunks.take()) is not None:
                made = frames(chunk)
                if not isinstance(made, bytes) or (made and not exchange.write(made)):
                    until.set_result(made)
                    return
                exchange.num_sent += len(made)
                if chunks.is_quiet:
                    return
            if chunks.is_over:
                until.set_result(None)
        except Exception as error:
            until.set_exception(error)

    chunks.on_more(more)
    more()
    try:
        return await until
    finally:
        chunks.on_more(None)
