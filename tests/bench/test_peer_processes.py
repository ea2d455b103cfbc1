"""Servers under test as processes: first answer, memory, pause, end, and their last words."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.machine import Command, PeerError, ServerProcess, busy_core
from tests.system.serving import wait_until

CODE = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(self.path)
        self.send_response(503 if len(asked) < 3 else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(code: str) -> Command:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Command([sys.executable, "-c", code, str(port)], port, {}, ".")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    running = ServerProcess(command(CODE), tmp_path / "log")
    yield running
    running.stop()


def statuses(server: ServerProcess) -> list[str]:
    return [p.status() for p in server._members()]


def test_a_server_with_its_children_is_timed_paused_weighed_and_ended(
    server: ServerProcess,
) -> None:
    assert server.first_answer({"prompt": "x"}, 30.0) > 0
    members = server._members()
    assert len(members) == 2
    assert 5 < server.memory_mib() < 200
    server.pause()
    stopped = [psutil.STATUS_STOPPED] * 2
    wait_until(lambda: statuses(server) == stopped, 60.0, "both to be stopped")
    server.resume()
    wait_until(lambda: psutil.STATUS_STOPPED not in statuses(server), 60.0, "both to go on")
    server.pause()
    server.stop()
    assert psutil.wait_procs(members, timeout=60)[1] == []


def test_a_server_that_ends_early_leaves_its_last_words(tmp_path: Path) -> None:
    running = ServerProcess(command("print('no such file: model'); exit(3)"), tmp_path / "log")
    with pytest.raises(PeerError, match="code 3: no such file: model"):
        running.first_answer({}, 30.0)
    running.stop()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    silent = ServerProcess(command("import time; time.sleep(60)"), tmp_path / "log")
    with pytest.raises(PeerError, match="no answer after"):
        silent.first_answer({}, 0.2)
    silent.stop()


def test_a_core_is_busy_only_within_the_block() -> None:
    before = set(psutil.Process().children())
    with busy_core():
        (busy,) = set(psutil.Process().children()) - before
        assert len(busy.cpu_affinity()) == 1
    assert not busy.is_running()
