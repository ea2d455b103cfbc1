"""Threads: CPU work about long texts, done where it does not hold up the streams of others."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREAD_BYTES = 8 << 10
"""Texts above this are parsed, rendered and tokenised off the event loop: it takes about two
milliseconds for each KiB."""


def use_threads(number: int) -> None:
    """Let the running event loop have `number` threads for `off_loop`; 0 = as many as it likes."""
    if number:
        pool = ThreadPoolExecutor(number, thread_name_prefix="words")
        asyncio.get_running_loop().set_default_executor(pool)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run CPU work about `size` bytes, in a thread when that is more than THREAD_BYTES."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()
