"""Threads: CPU work about long texts, done where it does not hold up the streams of others."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

THREAD_BYTES = 8 << 10
"""Texts above this are parsed, rendered and tokenised off the event loop: it takes about two
milliseconds for each KiB."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run CPU work about `size` bytes, in a thread when that is more than THREAD_BYTES."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()
