"""Real servers in processes of their own: start, wait until ready, watch, end without remains."""

import contextlib
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
READY_S = 180.0
CALL_S = 60.0
POLL_S = 0.02
TAIL_LINES = 60


def runs(process: psutil.Process | int, module: str) -> bool:
    """Whether a process runs `python -m module`; one that has ended does not."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one of these
        one = psutil.Process(process) if isinstance(process, int) else process
        return module in one.cmdline()
    return False


class Server:
    """One `python -m banyan.launch_server` with everything it has started."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.http = httpx.Client(base_url=self.url, timeout=CALL_S, verify=False)  # no certificates

    @property
    def pid(self) -> int:
        return self.process.pid

    def members(self) -> list[int]:
        """Live processes of this server, orphans included: all that share its session."""
        return [p for p in psutil.pids() if p != self.pid and _session_of(p) == self.pid]

    def engine_pids(self) -> list[int]:
        """The children that are engines, in the order in which they were started."""
        return sorted(self.children_of("banyan.server.processes", is_deep=False))

    def children_of(self, module: str, is_deep: bool = True) -> list[int]:
        """The live children, and theirs, that run this module."""
        children = psutil.Process(self.pid).children(recursive=is_deep)
        return [child.pid for child in children if runs(child, module)]

    def engine_pid(self) -> int:
        """The one child that is an engine."""
        (pid,) = self.engine_pids()
        return pid

    def rank_pids(self) -> list[int]:
        """The children of the one engine."""
        return [c.pid for c in psutil.Process(self.engine_pid()).children()]

    def sockets(self) -> list[Path]:
        """Unix sockets in the file system that its processes hold."""
        processes = [psutil.Process(p) for p in (self.pid, *self.members())]
        found = [c.laddr for p in processes for c in p.net_connections("unix")]
        return [Path(path) for path in found if path.startswith("/")]

    def generate(self, **body: object) -> dict:
        """One native request that must succeed."""
        answer = self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stats(self) -> dict:
        """The counters and ledgers of the engines, added up."""
        parts = [state["stats"] for state in self.facts()["internal_states"]]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def facts(self) -> dict:
        answer = self.http.get("/get_server_info")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end of the server process."""
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def kill(self) -> None:
        """End whatever is left of it, at once."""
        self.http.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def launch(log: Path, *flags: str, port: int = 0) -> Server:
    """Start a server and return at once."""
    port = port or free_port()
    command = [sys.executable, "-m", "banyan.launch_server", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Server(process, port, log)


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    """A server that is ready; killed whole at the end; shows the end of its log on failure."""
    server = launch(log, *flags)
    try:
        wait_ready(server)
        yield server
    except BaseException:
        print(f"--- {log.name}\n{server.tail()}", file=sys.stderr)
        raise
    finally:
        server.kill()


def wait_ready(server: Server) -> None:
    def is_ready() -> bool:
        code = server.process.poll()
        assert code is None, f"the server ended with code {code}:\n{server.tail()}"
        return status_of(server, "/readyz") == 200

    wait_until(is_ready, READY_S, "the server to be ready")


def status_of(server: Server, path: str) -> int:
    """HTTP status, 0 when nobody answers; on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def run_to_end(log: Path, *flags: str, timeout_s: float) -> tuple[int, str, float]:
    """Start a server that is expected to refuse: exit code, output, CPU seconds it took.

    CPU seconds say the same on a busy machine; `timeout_s` is of the wall.
    """
    before = _cpu_of_ended_children()
    server = launch(log, *flags)
    try:
        code = server.exit_code(timeout_s)
    finally:
        server.kill()
    return code, log.read_text(errors="replace"), _cpu_of_ended_children() - before


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Poll until `condition` holds; returns the seconds it took, fails after `deadline_s`."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < deadline_s, f"waited {waited:.1f} s for {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started


def free_port() -> int:
    """One with a free one behind it, where nodes meet their ranks; below those that the system
    gives to connections, which may take any of them a moment later."""
    while True:
        port = random.randrange(10_000, 32_000)
        try:
            for offset in (0, 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port


def settled(stats: Callable[[], dict], finished: int) -> dict:
    """The counters once `finished` requests in all have ended and nothing is in flight.

    An answer comes with counters that know of it, but what was in flight behind it may still run.
    """

    seen: list[dict] = []

    def is_settled() -> bool:
        seen.append(now := stats())
        is_idle = now["in_flight_pages"] == 0 == now["held_pages"] and now["running"] == 0
        return is_idle and now["finished"] >= finished

    wait_until(is_settled, CALL_S, f"{finished} requests to end")
    return seen[-1]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def stream_events(response: httpx.Response) -> Iterator[dict]:
    """Objects of a server-sent event stream up to [DONE], which must come exactly once, last."""
    is_done = False
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        assert not is_done, f"after [DONE]: {line}"
        if line == "data: [DONE]":
            is_done = True
        else:
            yield json.loads(line.removeprefix("data: "))
    assert is_done, "the stream ended without [DONE]"


def _cpu_of_ended_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _session_of(pid: int) -> int:
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return 0
        return os.getsid(pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return 0
