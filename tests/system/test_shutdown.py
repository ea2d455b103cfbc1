"""How a server leaves: streams finish first, and neither process nor socket is left."""

import os
import signal
import subprocess
import time

import pytest

from tests.support.streams import ENDLESS, finished, is_error, load
from tests.system.serving import CALL_S, launch, status_of, wait_until


def test_sigterm_lets_running_streams_finish_and_refuses_new_requests(server):
    with server(*ENDLESS) as running:
        streams = load(running, max_new_tokens=2000)
        engine = running.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # no stream ends before the refusal is seen
        os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: status_of(running, "/readyz") == 503, CALL_S, "/readyz to be 503")
        late = running.http.post("/generate", json={"input_ids": [5], "sampling_params": {}})
        assert late.status_code == 503 and "shutting down" in late.text
        assert int(late.headers["retry-after"]) >= 1
        os.kill(engine, signal.SIGCONT)
        for stream in streams:
            assert finished(stream.end(CALL_S)) == ["length"]
        assert running.exit_code(60.0) == 0
        assert running.members() == []


def test_a_stream_that_outlives_the_drain_timeout_gets_a_final_event(server):
    with server("--drain-timeout", "0.3", *ENDLESS) as running:
        streams = load(running)
        subprocess.run(["kill", "-TERM", str(running.pid)], check=True)
        ends = [stream.end(60.0) for stream in streams]
        is_cut = [is_error(events[-1]) or finished(events) == ["abort"] for events in ends]
        assert any(is_cut), "every answer was whole before the timeout"
        assert all(cut or finished(e) == ["length"] for cut, e in zip(is_cut, ends, strict=True))
        assert running.exit_code(60.0) == 0
        assert running.members() == []


def test_the_end_of_the_terminal_drains_like_sigterm(server):
    with server(*ENDLESS) as running:
        streams = load(running, count=2, max_new_tokens=1000)
        os.killpg(running.pid, signal.SIGHUP)
        wait_until(lambda: status_of(running, "/readyz") in (0, 503), CALL_S, "/readyz to be 503")
        for stream in streams:
            assert finished(stream.end(CALL_S)) == ["length"]
        assert running.exit_code(60.0) == 0
        assert running.members() == []


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
def test_sigterm_while_a_server_starts_ends_it_in_order(tiny_model, tmp_path, delay_s):
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        # By its name the child tells that the program has begun.
        wait_until(lambda: running.members() != [], CALL_S, "the engine to start")
        time.sleep(delay_s)  # the moment is what is tested
        os.kill(running.pid, signal.SIGTERM)
        assert running.exit_code(60.0) == 0
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
    finally:
        running.kill()


def test_a_second_sigterm_ends_the_server_at_once(server):
    with server("--drain-timeout", "600", *ENDLESS) as running:
        load(running)
        subprocess.run(["kill", "-TERM", str(running.pid)], check=True)
        wait_until(lambda: status_of(running, "/readyz") == 503, 60.0, "/readyz to be 503")
        subprocess.run(["kill", "-TERM", str(running.pid)], check=True)
        running.exit_code(60.0)
        assert running.members() == []


def test_an_idle_server_leaves_at_once_on_sigterm(server):
    with server() as running:
        for number in ("USR1", "USR2"):
            subprocess.run(["kill", f"-{number}", str(running.pid)], check=True)
        wait_until(lambda: "SIGUSR2 has no effect" in running.log.read_text(), 60.0, "the log")
        assert status_of(running, "/health") == 200
        subprocess.run(["kill", "-TERM", str(running.pid)], check=True)
        assert running.exit_code(60.0) == 0
        assert running.members() == []


def test_neither_process_nor_socket_outlives_a_killed_server(server):
    with server(*ENDLESS) as running:
        load(running)
        assert running.members() != []
        sockets = running.sockets()
        subprocess.run(["kill", "-9", str(running.pid)], check=True)
        running.exit_code(60.0)
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
        assert not any(path.exists() or path.parent.exists() for path in sockets)


@pytest.mark.parametrize("delay_s", [0.05, 0.5, 1.5])
def test_no_process_outlives_a_server_that_is_killed_while_it_starts(tiny_model, tmp_path, delay_s):
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        time.sleep(delay_s)  # the moment of the kill is what is tested
        subprocess.run(["kill", "-9", str(running.pid)], check=True)
        running.exit_code(60.0)
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
    finally:
        running.kill()
