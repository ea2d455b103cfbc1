"""Server processes under test: start, first answer, memory, pause, end; and a foreign busy one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_POLL_S = 0.05
_END_S = 15.0
_TAIL_LINES = 12
MIB = 1 << 20


class PeerError(Exception):
    """A peer that cannot be set up, started or measured; the reason goes into the report."""


@dataclass(frozen=True)
class Command:
    """How a server is started, and how long it may take."""

    words: Sequence[str]
    port: int
    variables: Mapping[str, str]
    cwd: str
    start_timeout_s: float = 420.0


class ServerProcess:
    """One server with all its processes, in a session of its own."""

    def __init__(self, command: Command, log: Path) -> None:
        self.url = f"http://127.0.0.1:{command.port}"
        self._log = log
        self._began = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command.words),
                cwd=command.cwd,
                env={**os.environ, **command.variables},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_answer(self, body: Mapping[str, object], timeout_s: float) -> float:
        """Ask for one token until it comes; seconds since the start of the process."""
        problem = "no connection"
        while (waited := time.monotonic() - self._began) < timeout_s:
            if self._process.poll() is not None:
                raise PeerError(f"it ended with code {self._process.returncode}: {self._tail()}")
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
                if answer.status_code == 200:
                    return time.monotonic() - self._began
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                problem = str(error)
            time.sleep(_POLL_S)
        raise PeerError(f"no answer after {waited:.0f} s: {problem}")

    def memory_mib(self) -> float:
        """Proportional set size of all its processes: shared pages count once."""
        return sum(_pss_bytes(p.pid) for p in self._members()) / MIB

    def pause(self) -> None:
        """Take its processes off the CPU, so that the others are measured alone."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        members = self._members()
        self._signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=_END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _members(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A foreign process that keeps one core busy."""
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        process.kill()
        process.wait()


def threads_cpu_s(pid: int) -> float:
    """Seconds of processor time of the threads that live; psutil counts in steps of 10 ms."""
    found = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += int((thread / "schedstat").read_text().split()[0])
    return found / 1e9


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended, or is not ours to read
    return 0
