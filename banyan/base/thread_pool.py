"""A thread pool for CPU work on long texts, which would block the event loop, and a way for threads
to wake a loop.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER, FairShare, TurnQueue
from banyan.base.log import logger
from banyan.base.os import num_cores

log = logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

THREAD_BYTES = 8 << 10
"""Longer texts are parsed, rendered and tokenized off the event loop: each KiB takes about two
milliseconds."""
JOB_S = 120.0
"""Longest wait for a thread and its work; twice the time of the longest body on a slow core."""
_MAX_LOST = 64


class WakeEvent:
    """An eventfd. Any thread and any signal handler may call `wake`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Polls readable from `wake` until `clear`."""
        self._is_closed = False

    def wake(self) -> None:
        if not self._is_closed:  # a signal may arrive while the process ends
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self.fd)


class Pool(ThreadPoolExecutor):
    """A pool of daemon threads, which do not delay the exit of the process.

    Callers (`CALLER`) take turns, and one caller's jobs leave a thread for other callers. A
    thread that works on one job for longer than `lost_s` no longer counts. The next job starts
    another thread, so that endless jobs do not block the others.

    Args:
        number: threads that work at the same time.
    """

    def __init__(self, number: int, lost_s: float = JOB_S) -> None:
        super().__init__(number)
        self._number = number
        self._lost_s = lost_s
        self._jobs: TurnQueue[Callable[[], None]] = TurnQueue(FairShare(number, reserved=1))
        self._begun: dict[str, tuple[float, bytes] | None] = {}
        """Thread -> start time and caller of its job; None if it is idle."""
        self._lost: set[str] = set()
        self._num_open = 0
        """Jobs that have not ended."""
        self._changed = threading.Condition()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # raised where the result is awaited
                future.set_exception(error)

        with self._changed:
            if self._is_shut:
                raise RuntimeError("the pool takes no more jobs")
            self._num_open += 1
            self._jobs.put(CALLER.get(), job)
            self._drop_lost()
            self._add_thread()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. Running jobs continue until the process ends, whatever `wait` is."""
        with self._changed:
            self._is_shut = True
            self._changed.notify_all()

    def _drop_lost(self) -> None:
        """Give back the places of endless jobs. Called with the lock held."""
        now = time.monotonic()
        for name, begun in self._begun.items():
            is_late = begun is not None and now - begun[0] > self._lost_s
            if begun is None or not is_late or name in self._lost or len(self._lost) > _MAX_LOST:
                continue
            self._lost.add(name)
            self._jobs.out.give_back(begun[1])
            log.warning("a thread has worked on one job for %g s", self._lost_s)

    def _add_thread(self) -> None:
        """Start one more thread if a job would have none. Called with the lock held."""
        num_threads = len(self._begun)
        if num_threads - len(self._lost) >= self._number or num_threads >= self._num_open:
            return
        name = f"words_{num_threads}"
        self._begun[name] = None
        threading.Thread(target=self._work, args=(name,), name=name, daemon=True).start()

    def _work(self, name: str) -> None:
        while (job := self._next(name)) is not None:
            job()
            job = None  # frees its text now; the next job may come much later
            with self._changed:
                self._end(name)

    def _next(self, name: str) -> Callable[[], None] | None:
        """The next job of this thread; None when the pool is shut."""
        with self._changed:
            while (found := self._jobs.get()) is None:
                if self._is_shut:
                    return None
                self._changed.wait()
            caller, job = found
            self._begun[name] = (time.monotonic(), caller)
            return job

    def _end(self, name: str) -> None:
        begun, self._begun[name] = self._begun[name], None
        self._num_open -= 1
        assert begun is not None
        if name in self._lost:
            self._lost.remove(name)
        else:
            self._jobs.out.give_back(begun[1])


def use_threads(waiting: int = 0) -> None:
    """Set the thread pool of the running event loop for `off_loop`.

    waiting: additional threads, for work that mostly waits for other threads or processes.
    """
    cores = num_cores()
    asyncio.get_running_loop().set_default_executor(Pool(min(32, cores + 4) + waiting))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run CPU work on `size` bytes; in a thread if there are more than THREAD_BYTES.

    Raises:
        RequestError: 503; it was not finished within JOB_S.
    """
    if size <= THREAD_BYTES:
        return work()
    try:
        async with asyncio.timeout(JOB_S):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise RequestError(
            f"{size} bytes of the request were not read within {JOB_S:g} s",
            status=503,
            code="overloaded",
            hint="Try again, or send less at once",
        ) from None
