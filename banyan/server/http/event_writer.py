"""Streams: events are written in the call that delivers their chunk.

A step of the engine delivers chunks to many streams. Waking a task for each takes longer than
encoding its event, so a task runs only if a stream has to wait.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from banyan.requests.chunks import Chunks
from banyan.server.http.exchange import HttpExchange

T = TypeVar("T")

Later = Callable[[], Awaitable[bytes]]
"""Makes a frame that needs waiting."""


async def follow(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> None:
    """Start a stream with the first chunk, and send the frame of each chunk.

    The chunks wait while the client's buffer is full or `frames` waits.

    Args:
        frames: encodes a chunk; b"" = nothing to send.
    """
    async for first in chunks:
        await exchange.begin_events()
        made = frames(first)
        while made is not None:
            frame = made if isinstance(made, bytes) else await made()
            if frame:
                await exchange.event(frame)
            made = await _write_ready(exchange, chunks, frames)


async def _write_ready(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> bytes | Later | None:
    """Write until a frame has to wait, and return that; None at the end."""
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
