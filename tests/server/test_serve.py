"""A server process from start to exit: ready line, drain, second signal, a dying engine."""

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from banyan.base.errors import CapacityError, ConfigError, ModelError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.schema import Config, ServerConfig
from banyan.messages.events import Ready
from banyan.server.http.listen import bind, check_exposure
from banyan.server.lifecycle.serve import Server
from banyan.server.lifecycle.supervisor import open_client
from tests.server.fakes import TEMPLATE, byte_tokenizer
from tests.server.scripted_server import DEADLY_TOKENS
from tests.support.flags import config_of

ROOT = Path(__file__).resolve().parents[2]
READY = "The server is fired up and ready to roll!"


class Process:
    """One scripted server; its log lines come through a queue."""

    def __init__(
        self, folder: Path, drain_s: float, restarts: int = 0, proof_s: float = 600.0
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        command = [sys.executable, "-m", "tests.server.scripted_server"]
        self.process = subprocess.Popen(
            [*command, str(self.port), str(folder), str(drain_s), str(restarts), str(proof_s)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False)

    def wait_line(self, part: str) -> None:
        """Wait for a log line that holds `part`."""
        while (line := self._queue.get(timeout=60)) is not None:
            self.lines.append(line)
            if part in line:
                return
        raise AssertionError(f"no {part!r} in\n" + "".join(self.lines))

    def end(self, timeout_s: float = 20.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(60)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line)
        self._queue.put(None)


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@contextlib.contextmanager
def serving(
    folder: Path, drain_s: float = 10.0, until: str = READY, **restarts: float
) -> Iterator[Process]:
    server = Process(folder, drain_s, **restarts)
    try:
        server.wait_line(until)
        yield server
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


def stream(server: Process, num_tokens: int, first: threading.Barrier, out: list[str]) -> None:
    """Read one stream to its end into `out`; pass the barrier after the first event."""
    body = {"prompt": "x", "max_tokens": num_tokens, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        out.append(next(lines))
        first.wait(60)
        out.extend(lines)


def start_streams(server: Process, count: int, num_tokens: int) -> tuple[list, list[list[str]]]:
    """`count` streams that have each had their first event."""
    first = threading.Barrier(count + 1)
    outs: list[list[str]] = [[] for _ in range(count)]
    threads = [
        threading.Thread(target=stream, args=(server, num_tokens, first, out)) for out in outs
    ]
    for thread in threads:
        thread.start()
    first.wait(60)
    return threads, outs


def test_start_prints_phases_the_ready_line_and_a_command(model: Path) -> None:
    with serving(model) as server:
        server.wait_line("try: curl http://127.0.0.1:")
        text = "".join(server.lines)
        assert "start-up took" in text and "KV cache: " in text
        assert "engine: weights" not in text and len(server.lines) <= 12, text
        assert server.http.get("/health").status_code == 200
        info = server.http.get("/server_info").json()
        assert {"engine: weights", "warm-up"} <= info["startup_phases"].keys()
        assert sum(info["startup_phases"].values()) == pytest.approx(info["startup_time"])
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        answer = server.http.post("/v1/chat/completions", json=chat).json()
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("what", ["late", "slow", "busy"])
def test_a_server_that_is_not_ready_is_alive_and_can_be_stopped(tmp_path: Path, what: str) -> None:
    """Neither an engine that loads, nor a model that is still being fetched, nor a thread without
    end holds up health or the exit."""
    folder = write_tokenizer(tmp_path / what)
    server = Process(folder, 10.0)
    try:
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=server.http.base_url, transport=transport) as patient:
            assert patient.get("/livez").status_code == 200
            assert patient.get("/readyz").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait()


def test_a_process_ends_in_time_though_no_line_of_python_runs(tmp_path: Path) -> None:
    with serving(write_tokenizer(tmp_path / "stuck"), until="stuck") as server:
        with pytest.raises(httpx.TimeoutException):
            for _ in range(100):  # it may answer between its line and the lock that it keeps
                server.http.get("/livez", timeout=0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == -signal.SIGALRM


def test_a_process_ends_in_time_though_its_engine_does_not(tmp_path: Path) -> None:
    with serving(write_tokenizer(tmp_path / "deaf"), drain_s=0.5) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == -signal.SIGALRM


def test_a_model_that_cannot_be_had_ends_the_server_with_its_own_code(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "broken")
    with serving(folder, until="the model cannot be read") as server:
        assert server.end() == ModelError.exit_code


def test_a_drain_lets_streams_end_and_refuses_new_requests(model: Path) -> None:
    with serving(model) as server:
        threads, outs = start_streams(server, 8, 60)
        server.process.send_signal(signal.SIGTERM)
        server.wait_line("draining requests=8")
        assert server.http.get("/readyz").status_code == 503
        refused = server.http.post("/generate", json={"text": "a"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for thread in threads:
            thread.join(60)
        assert server.end() == 0
    for out in outs:
        assert out[-1] == "data: [DONE]"
        assert json.loads(out[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_streams_beyond_the_drain_time_get_a_last_event(model: Path) -> None:
    with serving(model, drain_s=0.1) as server:
        threads, outs = start_streams(server, 4, 4000)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert server.end() == 0
    for out in outs:
        assert out[-1] == "data: [DONE]"
        assert json.loads(out[-2].removeprefix("data: "))["error"]["code"] == 503


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_a_second_signal_or_an_interrupt_ends_at_once(model: Path, signals: tuple) -> None:
    with serving(model, drain_s=600) as server:
        threads, outs = start_streams(server, 2, 4000)
        for number in signals:
            server.process.send_signal(number)
            server.wait_line(f"received {number.name}")
        assert server.end(60) == 0
        for thread in threads:
            thread.join(60)
    assert all(out[-1] == "data: [DONE]" for out in outs)


def test_a_dead_engine_is_a_503_then_an_exit_with_its_own_code(model: Path) -> None:
    with serving(model) as server:
        threads, outs = start_streams(server, 2, 4000)
        deadly = {"prompt": "x", "max_tokens": DEADLY_TOKENS}
        answer = server.http.post("/v1/completions", json=deadly)
        assert answer.status_code == 503 and "SIGKILL" in answer.text
        for thread in threads:
            thread.join(60)
        for path in ("/health", "/readyz"):
            assert server.http.get(path).status_code == 503
        assert server.http.post("/generate", json={"text": "a"}).status_code == 503
        assert server.http.get("/livez").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 5
    for out in outs:
        assert out[-1] == "data: [DONE]" and "SIGKILL" in out[-2]


DEADLY = {"prompt": "x", "max_tokens": DEADLY_TOKENS}
"""Kills two engines: the one that has it, and the one that runs it again."""
BACK = "the engine serves again after"


def test_an_engine_is_started_again_as_often_as_is_allowed(model: Path) -> None:
    with serving(model, restarts=2) as server:
        threads, outs = start_streams(server, 2, 4000)
        answer = server.http.post("/v1/completions", json=DEADLY)
        assert answer.status_code == 503 and "SIGKILL" in answer.text
        for thread in threads:
            thread.join(60)
        server.wait_line("is being started again (1 of 2): engine (pid 1) was killed by SIGKILL")
        server.wait_line(BACK)
        server.wait_line("is being started again (2 of 2)")
        refused = server.http.get("/readyz")
        assert refused.status_code == 503 and "is being started again (2 of 2)" in refused.text
        assert server.http.get("/health").status_code == 503
        server.wait_line(BACK)
        assert server.http.get("/readyz").status_code == 200
        alive = {"prompt": "x", "max_tokens": 3}
        assert server.http.post("/v1/completions", json=alive).json()["usage"]
        answer = server.http.post("/v1/completions", json=DEADLY)
        assert answer.status_code == 503 and "after 2 restarts" in answer.text
        assert server.http.get("/readyz").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 5
    for out in outs:
        assert out[-1] == "data: [DONE]" and "SIGKILL" in out[-2]


def test_restarts_are_forgotten_after_the_time_given(model: Path) -> None:
    with serving(model, restarts=1, proof_s=0.0) as server:
        for _ in range(2):
            answer = server.http.post("/v1/completions", json=DEADLY)
            assert answer.status_code == 503
            server.wait_line("is being started again (1 of 1)")
            server.wait_line(BACK)
        assert server.http.get("/livez").status_code == 200


def under(**variables: str) -> Config:
    return parse([], read_environment({f"SGLANG_{name}": v for name, v in variables.items()}))


def test_idle_connections_end_after_the_seconds_given() -> None:
    """uvicorn's own tests show that it keeps to its number."""

    def kept_s(config: Config) -> float:
        with contextlib.closing(bind(ServerConfig(port=0))) as listener:
            (http,) = Server(config, never, [("http", listener)], never)._listeners
            return http.web.config.timeout_keep_alive

    assert (kept_s(under()), kept_s(under(TIMEOUT_KEEP_ALIVE="7"))) == (30, 7)


def test_an_engine_may_be_silent_for_the_seconds_given(tmp_path: Path) -> None:
    def is_well(silent_s: float, config: Config) -> bool:
        client = open_client(config, f"ipc://{tmp_path}/front")
        client._deliver(Ready(max_total_tokens=1, max_request_tokens=1, max_running=1))
        client.stats_at_s -= silent_s
        client._connection.link.close()
        return client.health().progressing

    assert is_well(10, under()) and not is_well(30, under())
    assert not is_well(10, under(HEALTH_CHECK_TIMEOUT="5"))
    assert is_well(30, under(HEALTH_CHECK_TIMEOUT="60"))


def never(*_: object) -> None:
    raise AssertionError("nothing is served")


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CapacityError, match=f"127.0.0.1:{port} is in use"):
            bind(ServerConfig(port=port))


def test_a_server_listens_where_configured_and_nowhere_else() -> None:
    config = config_of("--host", "127.0.0.2", "--port", "0")
    with contextlib.closing(bind(config.server)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.2", port), timeout=60):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)


def test_an_address_of_no_machine_is_named() -> None:
    with pytest.raises(ConfigError, match="203.0.113.7"):
        bind(ServerConfig(host="203.0.113.7"))


def test_an_open_server_warns_and_require_key_refuses(caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(ServerConfig(host="0.0.0.0"))
    assert "Anyone who reaches 0.0.0.0" in caplog.text
    with pytest.raises(ConfigError, match="--require-key"):
        check_exposure(config_of("--host", "0.0.0.0", "--require-key").server)
    check_exposure(ServerConfig(host="0.0.0.0", require_key=True, api_key="k"))


def test_servers_on_any_free_port_keep_their_files_apart() -> None:
    config = Config(server=ServerConfig(port=0))
    found = []
    for _ in range(2):
        with contextlib.closing(bind(config.server)) as listener:
            made = Server(config, lambda: None, [("http", listener)], lambda *_: None)
            found.append((made.state.storage._folder.path.name, listener.getsockname()[1]))
    assert all(name == str(port) and port for name, port in found)
