"""Child processes: start them, notice their death, stop them. Children never outlive the parent.

A child reads its process spec as one length-prefixed message from standard input. The pipe stays
open; end of file means that the parent is gone. The kernel's parent-death signal covers children
that cannot read (stopped, or busy in native code).

A child is a new program (`spawn`), a fork of this process with its libraries loaded
(`fork_spares`), or a worker that answers one task at a time over its standard streams
(`WorkerProcess`). An answer is a uint64 length and that many bytes. Chat templates, tokenizers and
grammar compilers run as workers: a task may hang, crash or take too much memory without harm to the
server.
"""

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from banyan.base.clock import WallClock
from banyan.base.errors import DeviceError
from banyan.base.log import logger
from banyan.base.os import die_with_parent

log = logger(__name__)
_MOMENT = struct.Struct("<d")
_PULSE_S = 0.5
STACKS = signal.SIGUSR1
"""Signal on which a child writes the stack traces of its threads."""
_REPORT_S = 2.5
"""Time for an unresponsive process to write its stack traces."""

LENGTH = struct.Struct("<Q")
"""Length of the message that follows."""
STALL_S = 5.0
"""A process that has a task and uses no processor time for this long has stopped."""
_LOOKS = 10
"""Checks in that time: a machine that freezes for seconds delays one of them, not all."""
_TIMES_AT = 11
"""Index of utime and stime among the fields after the name in /proc/PID/stat."""


class Process(Protocol):
    """A started process; a part of the interface of `subprocess.Popen`."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Child:
    """One child process of this one."""

    def __init__(self, role: str, process: Process) -> None:
        self.role = role
        self._process = process
        self._watcher: threading.Thread | None = None
        self._is_expected = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def assign(self, process_spec: bytes) -> None:
        """Send the process spec, once.

        Raises:
            DeviceError: the child ended before it read the spec.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(LENGTH.pack(len(process_spec)) + process_spec)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise DeviceError(self._end_of(self._process.wait())) from None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death(what happened)` from a thread if the child ends without `stop`."""

        def wait() -> None:
            code = self._process.wait()
            if not self._is_expected:
                on_death(self._end_of(code))

        self._watcher = threading.Thread(target=wait, name=f"watch-{self.role}", daemon=True)
        self._watcher.start()

    def _end_of(self, code: int) -> str:
        return f"{self.role} (pid {self.pid}) {_describe(code)}"

    def stop(self, grace_s: float = 3.0) -> None:
        """Ask the child to end; kill it after `grace_s`."""
        self._is_expected = True
        if self.is_alive():
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                log.warning("%s pid=%d did not end in %.1f s: killed", self.role, self.pid, grace_s)
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        self._let_go()

    def put_down(self, report_s: float = _REPORT_S) -> None:
        """Kill an unresponsive child; it logs its stack traces first, if it still can."""
        self._is_expected = True
        if self.is_alive():
            state = doing(self.pid)
            log.error("%s pid=%d does not answer (it %s): killed", self.role, self.pid, state)
            self.signal(STACKS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if state == STOPPED else report_s)
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._let_go()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _let_go(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def spawn(
    module: str,
    role: str,
    process_spec: bytes = b"",
    shared: Sequence[int] = (),
    spare: Process | None = None,
) -> Child:
    """Run `python -m module` as a child.

    Call it from a thread that lives as long as the child should: the parent-death signal follows
    the thread that made the child.

    Args:
        process_spec: sent at once; if empty, the child waits for `Child.assign`.
        shared: descriptors that the child inherits under the same numbers.
        spare: a process that runs the module already and waits for its process spec.
    """
    if spare is None:
        command = [sys.executable, "-m", module]
        spare = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared)
    child = Child(role, spare)
    if process_spec:
        child.assign(process_spec)
    return child


class _Copy:
    """A copy of this process, as a `Process`."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self._code: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self._code = os.waitstatus_to_exitcode(status)
                    os.close(self._pidfd)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        poller = select.poll()
        with self._lock:
            if self._code is not None:
                return self._code
            end = os.dup(self._pidfd)  # another thread in `poll` may close it
        try:
            poller.register(end, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        finally:
            os.close(end)
        code = self.poll()
        assert code is not None, "the process has ended"
        return code

    def forget(self) -> None:
        """In another fork: close what was inherited of this one, which is not its child."""
        self.stdin.close()
        os.close(self._pidfd)

    def send_signal(self, sig: int) -> None:
        with self._lock:
            if self._code is None:  # the kernel may have given its pid to another process
                os.kill(self.pid, sig)


def fork_spares(count: int) -> list[Process] | None:
    """Fork `count` copies of this process, for `spawn(spare=…)`.

    A fork has only the thread that called it, and locks that other threads held stay locked. A
    process with other threads (a debugger, a monitoring agent) is therefore not forked: `spawn`
    starts fresh processes instead, which takes longer.

    Returns:
        The copies, none if this process has other threads. In each copy None: it then reads a
        process spec like any other child.
    """
    if count and threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        log.warning("ranks start as fresh processes, not as forks: other threads run (%s)", names)
        return []
    spares: list[_Copy] = []
    for _ in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(reader, 0)
            os.close(reader)
            os.close(writer)
            for spare in spares:
                spare.forget()
            return None
        os.close(reader)
        spares.append(_Copy(pid, os.fdopen(writer, "wb")))
    return list(spares)


def follow_parent() -> None:
    """In a child: die with the parent, and ignore signals to the whole process group (Ctrl-C, end
    of the terminal), which the parent handles."""
    die_with_parent()
    if _is_abandoned():
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _is_abandoned() -> bool:
    """Whether the parent ended before the parent-death signal was set up."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    return any(events == select.POLLHUP for _, events in poller.poll(0))


def read_process_spec() -> bytes:
    """In a child: read the process spec, and arrange to die with the parent."""
    follow_parent()
    (length,) = LENGTH.unpack(_read(0, LENGTH.size))
    return _read(0, length)


def watch_parent() -> None:
    """In a child that has read its spec: start a thread that exits when the parent is gone."""
    source = os.dup(0)

    def watch() -> None:
        while os.read(source, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


STOPPED = "was stopped by a signal"


def doing(pid: int) -> str:
    """State of a process as text (Linux: proc(5), field 3 of stat)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone"
    found = {"T": STOPPED, "D": "waits for a device", "R": "runs", "S": "waits"}
    return found.get(state, f"is in state {state}")


class Pulse:
    """A heartbeat file: one process writes the time, another one reads its age.

    Both use the machine's monotonic clock.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def beat(self) -> None:
        """Write the current time."""
        self._path.write_bytes(_MOMENT.pack(WallClock().now()))

    def keep_beating(self) -> None:
        """Start a thread that writes the time until the process ends."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

        def run() -> None:
            while True:
                os.pwrite(descriptor, _MOMENT.pack(WallClock().now()), 0)
                threading.Event().wait(_PULSE_S)

        threading.Thread(target=run, name="pulse", daemon=True).start()

    def silence_s(self) -> float:
        """Seconds since the last beat; there must have been one."""
        (moment,) = _MOMENT.unpack(self._path.read_bytes())
        return WallClock().now() - moment


def _read(fd: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            raise SystemExit("the parent ended before it sent the process spec")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


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

    def run(self, task: bytes | bytearray, limit_s: float | None = None) -> bytes:
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
