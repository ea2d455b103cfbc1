"""Work in threads that, unlike asyncio's own, no exit waits for."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in such a thread."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    return asyncio.wrap_future(outcome)
