"""Child: a process of one's own that answers one task at a time over its standard streams.

Both ways a frame is uint64 little-endian length and a body; a task may have a head of its own
before that. Knows nothing of tasks.
"""

import os
import select
import struct
import subprocess
import sys
import weakref

LENGTH = struct.Struct("<Q")
STILL_S = 5.0
"""A process that has a task and computes nothing for so long has stopped."""
_TIMES_AT = 11
"""Of the processor time, among the words behind the name in /proc/PID/stat."""


class Child:
    """A running `python -m MODULE`. Ends with this object, and with this process.

    Args:
        most_bytes: of an answer.
    """

    def __init__(self, module: str, *words: str, most_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._most_bytes = most_bytes
        self.end = weakref.finalize(self, _end, self._process)
        """Kill it and wait for its end. Harmless when repeated."""

    def ask(self, task: bytes) -> bytes:
        """The answer to a task, which is its head and body.

        Raises:
            EOFError: it has ended, or had stopped and was killed; `exit_code` tells how.
            ValueError: it says something that is no answer.
        """
        assert self._process.stdin is not None
        view = memoryview(task)
        number = self._process.stdin.fileno()
        try:
            while view:
                self._wait(number, select.POLLOUT)
                view = view[os.write(number, view) :]
        except BrokenPipeError:
            raise EOFError from None
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if not 0 < length <= self._most_bytes:
            raise ValueError(f"it sends a frame of {length:,} bytes")
        return self._read(length)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """Wait for its end."""
        return self._process.wait()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        number = self._process.stdout.fileno()
        while size:
            self._wait(number, select.POLLIN)
            part = os.read(number, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, number: int, event: int) -> None:
        """Until this end of a pipe is ready, as long as the process computes."""
        poll = select.poll()
        poll.register(number, event)
        before = self._cpu_ticks()
        while not poll.poll(STILL_S * 1000):
            now = self._cpu_ticks()
            if now == before:
                self._process.kill()
                raise EOFError
            before = now

    def _cpu_ticks(self) -> list[bytes]:
        """Of user and system; nothing of a process that is gone."""
        try:
            with open(f"/proc/{self._process.pid}/stat", "rb") as file:
                told = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return told[_TIMES_AT : _TIMES_AT + 2]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
