"""WakeEvent: wakes a thread that sleeps in poll or epoll."""

import os
from contextlib import suppress


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
