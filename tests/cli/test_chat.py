import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.cli.client import Client


class Answering(BaseHTTPRequestHandler):
    """Answers chat completions with what the test scripted, and keeps what it was asked."""

    server: "Scripted"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, self.headers.get("authorization"), json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)
        if self.server.is_endless:
            self.wfile.flush()
            assert self.rfile.read(1) == b""  # returns when the client has closed
            self.server.was_left.set()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


class Scripted(ThreadingHTTPServer):
    def __init__(self, answer: bytes, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answer, self.status = answer, status
        self.is_endless = False
        self.was_left = threading.Event()
        self.asked: list[tuple[str, str | None, dict[str, object]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def server(answer: bytes, status: int = 200) -> Iterator[Scripted]:
    with Scripted(answer, status) as scripted:
        thread = threading.Thread(target=scripted.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield scripted
        finally:
            scripted.shutdown()
            thread.join()


def stream(*pieces: str, end: str = "data: [DONE]\n\n") -> bytes:
    first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    chunks = [first, *({"choices": [{"delta": {"content": piece}}]} for piece in pieces)]
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]]
    return (": ping\n\n" + "".join(lines) + end).encode()


def talk(url: str, typed: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "banyan", "chat", "--url", url, *flags],
        input=typed,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_pieces_of_an_answer_come_in_order() -> None:
    with server(stream("He", "llo ", "wörld")) as scripted:
        client = Client(scripted.url + "/v1/", "sk-1")
        assert "".join(client.answer({"messages": []})) == "Hello wörld"
        assert client.is_healthy()
    path, key, body = scripted.asked[0]
    assert (path, key, body["stream"]) == ("/v1/chat/completions", "Bearer sk-1", True)


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', 400, "400: too long"),
        (b'{"error": "Unauthorized"}', 401, "401: Unauthorized"),
        (b"<html>", 502, "502: <html>"),
        (stream("He", end='data: {"error": {"message": "rank 1 died"}}\n\n'), 200, "rank 1 died"),
        (stream("He", end=""), 200, "ended before the answer did"),
        (b"data: {\n\n", 200, "not JSON"),
    ],
)
def test_a_failed_answer_says_why(answer: bytes, status: int, said: str) -> None:
    with server(answer, status) as scripted, pytest.raises(BanyanError, match=said):
        list(Client(scripted.url).answer({"messages": []}))


def test_a_server_that_is_not_there_is_named() -> None:
    nobody = Client("http://127.0.0.1:9")
    assert not nobody.is_healthy()
    with pytest.raises(BanyanError, match="http://127.0.0.1:9 does not answer"):
        list(nobody.answer({"messages": []}))


@pytest.mark.parametrize("url", ["", "localhost", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url)


def test_a_talk_carries_what_was_said_until_it_is_reset() -> None:
    with server(stream("Hi.")) as scripted:
        done = talk(
            scripted.url, "one\n\ntwo\n/reset\nthree\n/quit\nfour\n", "--system", "Be kind."
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hi.\nHi.\nHi.\n"
    talks = [[m["content"] for m in body["messages"]] for _, _, body in scripted.asked]  # type: ignore[attr-defined,index]
    assert talks == [
        ["Be kind.", "one"],
        ["Be kind.", "one", "Hi.", "two"],
        ["Be kind.", "three"],
    ]


def test_settings_travel_with_every_request() -> None:
    with server(stream("Hi.")) as scripted:
        talk(scripted.url, "one\n", "--max-tokens", "5", "--temperature", "0", "--model-name", "m")
    body = scripted.asked[0][2]
    assert (body["max_tokens"], body["temperature"], body["model"]) == (5, 0.0, "m")


def test_a_refused_question_is_shown_and_forgotten() -> None:
    with server(b'{"error": {"message": "no"}}', 400) as scripted:
        done = talk(scripted.url, "one\ntwo\n")
    assert done.stderr.count("the server answered 400: no") == 2
    assert [len(body["messages"]) for _, _, body in scripted.asked] == [1, 1]  # type: ignore[arg-type]


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    with server(stream("a\x1b[2Jb\x07\n\tc")) as scripted:
        assert talk(scripted.url, "one\n").stdout == "a[2Jb\n\tc\n"


def test_server_flags_are_refused_when_a_server_runs_already() -> None:
    done = talk("http://127.0.0.1:9", "", "--page-size", "32")
    assert done.returncode == 2 and "--page-size goes to a server" in done.stderr


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on() -> None:
    with server(stream("Once", end="")) as scripted:
        scripted.is_endless = True
        chat = subprocess.Popen(
            [sys.executable, "-m", "banyan", "chat", "--url", scripted.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write(b"tell\n")
        chat.stdin.flush()
        assert chat.stdout.read(4) == b"Once"
        chat.send_signal(signal.SIGINT)
        assert scripted.was_left.wait(10)
        scripted.is_endless = False
        scripted.answer = stream("End.")
        rest, _ = chat.communicate(b"more\n/quit\n", timeout=10)
    assert (rest, chat.returncode) == (b"\nEnd.\n", 0)
    said = [m["content"] for m in scripted.asked[1][2]["messages"]]  # type: ignore[attr-defined,index]
    assert said == ["tell", "Once", "more"]
