"""WorkerProcess: a child process that answers one task at a time over its standard streams.

An answer is uint64 little-endian length and that many bytes. The caller frames its tasks itself.
Chat templates, tokenizers and grammar compilers run this way: a task may hang, crash or take too
much memory without harm to the server.
"""

import os
import select
import struct
import subprocess
import sys
import time
import weakref

LENGTH = struct.Struct("<Q")
STALL_S = 5.0
"""A process that has a task and uses no processor time for this long has stopped."""
_LOOKS = 10
"""Checks in that time: a machine that freezes for seconds delays one of them, not all."""
_TIMES_AT = 11
"""Index of utime and stime among the fields after the name in /proc/PID/stat."""


class WorkerProcess:
    """A running `python -m MODULE`. It is killed when this object or this process ends.

    Args:
        module: its main loop reads tasks from standard input until that ends.
        arguments: of the command line.
        max_answer_bytes: longer answers are an error.
    """

    def __init__(self, module: str, *arguments: str, max_answer_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._max_answer_bytes = max_answer_bytes
        self.close = weakref.finalize(self, _close, self._process)
        """Kill the process and wait for its end. May be called again."""

    def run(self, task: bytes, limit_s: float | None = None) -> bytes:
        """Send a task and return the answer.

        Args:
            limit_s: wall time for task and answer. None: no limit while the process uses
                processor time; the process may limit that itself.

        Raises:
            TimeoutError: `limit_s` has passed. The process still runs: close it.
            EOFError: the process has ended, or had stopped and was killed (see `exit_code`).
            ValueError: the length of the answer is not acceptable.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        assert self._process.stdin is not None
        view = memoryview(task)
        descriptor = self._process.stdin.fileno()
        try:
            while view:
                self._wait(descriptor, select.POLLOUT, deadline)
                view = view[os.write(descriptor, view) :]
        except BrokenPipeError:
            raise EOFError from None
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if not 0 < length <= self._max_answer_bytes:
            raise ValueError(f"it sends a frame of {length:,} bytes")
        return self._read(length, deadline)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """Wait for the end of the process."""
        return self._process.wait()

    def _read(self, size: int, deadline: float | None) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        descriptor = self._process.stdout.fileno()
        while size:
            self._wait(descriptor, select.POLLIN, deadline)
            part = os.read(descriptor, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float | None) -> None:
        """Wait until this end of a pipe is ready."""
        poll = select.poll()
        poll.register(descriptor, event)
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError
            return
        before, looks = self._cpu_ticks(), 0
        while not poll.poll(STALL_S * 1000 / _LOOKS):
            now = self._cpu_ticks()
            looks = looks + 1 if now == before else 0
            if looks == _LOOKS:
                self._process.kill()
                raise EOFError
            before = now

    def _cpu_ticks(self) -> list[bytes]:
        """User and system time used so far; [] if the process is gone."""
        try:
            with open(f"/proc/{self._process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return fields[_TIMES_AT : _TIMES_AT + 2]


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
