"""What is seen of a server from outside while hostile requests run: a canary's answers, how long
its event loop is blocked, and how much memory it takes."""

import http.client
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.system.serving import CALL_S, Server, stream_events

CANARY = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True},
}
SETTLED_S = 30.0
GROWN_MB = 20
PROBE_S = 0.01
"""Pause between two looks at the loop."""


class Canary:
    """One stream after another, each of which must bring the same tokens."""

    def __init__(self, server: Server) -> None:
        self.expected = server.generate(**CANARY)["output_ids"]
        self.songs: list[list[int]] = []
        self.failure: Exception | None = None
        self._url = server.url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sing, daemon=True)
        self._thread.start()

    def _sing(self) -> None:
        try:
            while not self._is_over.is_set():
                body = CANARY | {"stream": True}
                url = f"{self._url}/generate"
                with httpx.stream("POST", url, json=body, timeout=CALL_S, verify=False) as answer:
                    *_, last = stream_events(answer)
                    assert "output_ids" in last, last
                    self.songs.append(last["output_ids"])
        except Exception as error:  # raised again by `end`
            self.failure = error

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(CALL_S)
        assert self.failure is None, repr(self.failure)
        wrong = [(i, song) for i, song in enumerate(self.songs) if song != self.expected]
        assert self.songs and not wrong, f"{len(wrong)} of {len(self.songs)}: {wrong[0]}"


@dataclass
class Seen:
    """What a `watched` block did to the server. Filled in at its end."""

    blocked_s: float = 0.0
    """Longest time for which the event loop answered nobody while the process was computing."""
    grown_mb: float = 0.0
    """Resident memory of the server and its engine, after against before."""
    peak_mb: float = 0.0
    """The server's highest resident memory meanwhile, against before."""


@contextmanager
def watched(server: Server) -> Iterator[Seen]:
    """Look at the server during the block.

    A probe that takes long proves nothing on a busy machine: the loop counts as blocked only for
    as long as its own thread was computing meanwhile.
    """
    seen, is_over = Seen(), threading.Event()
    process = psutil.Process(server.pid)

    def probe() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
        while not is_over.is_set():
            cpu_s, at_s = _loop_cpu_s(server.pid), time.monotonic()
            connection.request("GET", "/livez")
            connection.getresponse().read()
            took_s = min(time.monotonic() - at_s, _loop_cpu_s(server.pid) - cpu_s)
            seen.blocked_s = max(seen.blocked_s, took_s)
            is_over.wait(PROBE_S)
        connection.close()

    _forget_peak(server)
    own_before = process.memory_info().rss / 2**20
    # Processes that are started meanwhile are not of it: they have limits of their own.
    members = [psutil.Process(pid) for pid in (server.pid, *server.members())]
    before = _resident_mb(members)
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join(CALL_S)
        assert not thread.is_alive(), f"/livez has been silent for {CALL_S} s"
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            seen.peak_mb = _peak_mb(server) - own_before
            seen.grown_mb = _settled_mb(members, before + GROWN_MB) - before


def _loop_cpu_s(pid: int) -> float:
    """CPU time of the main thread, which runs the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pids: Iterable[int]) -> float:
    """Memory that these processes hold now."""
    return _resident_mb([psutil.Process(pid) for pid in pids])


def _resident_mb(processes: list[psutil.Process]) -> float:
    return sum(p.memory_info().rss for p in processes if p.is_running()) / 2**20


def _settled_mb(processes: list[psutil.Process], enough_mb: float) -> float:
    """Resident memory once it is down to `enough_mb`: what is freed goes back a little later."""
    deadline_s = time.monotonic() + SETTLED_S
    while (now := _resident_mb(processes)) > enough_mb and time.monotonic() < deadline_s:
        time.sleep(PROBE_S)
    return now


def _forget_peak(server: Server) -> None:
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


def _peak_mb(server: Server) -> float:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10
