import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.cli.client import Client, Served

FULL = b'{"error": {"message": "too long by far", "code": "context_length_exceeded"}}'


class Answering(BaseHTTPRequestHandler):
    """Answers chat completions with what the test scripted, and keeps what it was asked."""

    server: "Scripted"

    def do_GET(self) -> None:
        found = {"/health": b"", "/v1/models": self.server.models}.get(self.path)
        is_locked = self.path != "/health" and self.server.status == 401
        self.send_response(404 if found is None else 401 if is_locked else 200)
        self.end_headers()
        self.wfile.write(found or b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers.get("authorization"), body))
        is_full = len(body.get("messages", ())) > self.server.max_messages
        self.send_response(400 if is_full else self.server.status)
        self.end_headers()
        self.wfile.write(FULL if is_full else self.server.answer)
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
        self.models = b'{"data": [{"id": "oak", "max_model_len": 4096}]}'
        self.max_messages = 100
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


def stream(*pieces: str, end: str = "data: [DONE]\n\n", finish: str = "stop") -> bytes:
    first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    chunks = [first, *({"choices": [{"delta": {"content": piece}}]} for piece in pieces)]
    chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    usage = {"choices": [], "usage": {"total_tokens": 3, "completion_tokens": 1024}}
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]]
    return (": ping\n\n" + "".join(lines) + end).encode()


def talk(url: str, typed: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "banyan", "chat", "--url", url, *flags],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_pieces_of_an_answer_come_in_order() -> None:
    with server(stream("He", "llo ", "wörld")) as scripted:
        client = Client(scripted.url + "/v1/", "sk-1")
        pieces = list(client.answer({"messages": []}))
        assert "".join(piece.text for piece in pieces) == "Hello wörld"
        assert [p.finish for p in pieces if p.finish] == ["stop"]
        assert pieces[-1].tokens == 1024
        assert client.is_healthy()
        assert client.served() == Served("oak", 4096)
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
    assert done.returncode == 1


def test_a_program_learns_that_nobody_answers_before_anybody_is_greeted() -> None:
    done = talk("http://127.0.0.1:9", "one\n")
    assert done.returncode == 1 and "http://127.0.0.1:9 does not answer" in done.stderr
    assert "/reset" not in done.stderr
    with server(b'{"error": "Unauthorized"}', 401) as scripted:
        done = talk(scripted.url, "one\n")
    assert done.returncode == 1 and scripted.asked == []
    assert "the server answered 401" in done.stderr and "/reset" not in done.stderr


def test_the_model_is_named_and_asked_for() -> None:
    with server(stream("Hi.")) as scripted:
        done = talk(scripted.url, "one\n")
    assert f"oak at {scripted.url}, 4,096 tokens of context" in done.stderr
    assert scripted.asked[0][2]["model"] == "oak"


def test_the_demo_is_called_a_toy() -> None:
    with server(stream("Hi.")) as scripted:
        assert "toy" not in talk(scripted.url, "").stderr
        scripted.models = b'{"data": [{"id": "demo"}]}'
        assert "is a toy to try the API" in talk(scripted.url, "").stderr


def test_a_server_that_lists_no_models_is_talked_to() -> None:
    with server(stream("Hi.")) as scripted:
        scripted.models = b"[]"
        assert talk(scripted.url, "one\n").stdout == "Hi.\n"
    assert scripted.asked[0][2]["model"] == "default"


def test_only_commands_that_exist_are_obeyed_and_no_other_is_asked() -> None:
    with server(stream("Hi.")) as scripted:
        done = talk(scripted.url, "/help\n/foo bar\n /etc is what?\n")
    asked = [body["messages"][-1]["content"] for _, _, body in scripted.asked]  # type: ignore[index]
    assert asked == ["/etc is what?"]
    assert "unknown command /foo; /help lists them" in done.stderr
    assert done.stderr.count("/reset forgets") == 2  # the greeting, and /help


def test_a_cut_answer_says_so() -> None:
    with server(stream("Once upon", finish="length")) as scripted:
        done = talk(scripted.url, "tell\n")
    assert done.stdout == "Once upon\n" and "[cut after 1,024 tokens" in done.stderr


def test_a_full_context_drops_the_oldest_turns_and_says_so() -> None:
    with server(stream("Hi.")) as scripted:
        scripted.max_messages = 4
        done = talk(scripted.url, "one\ntwo\nthree\n", "--system", "Be kind.")
        scripted.max_messages = 0
        alone = talk(scripted.url, "one\n")
    assert done.returncode == 0 and done.stdout == "Hi.\nHi.\nHi.\n"
    assert "its oldest 1 questions and answers are forgotten; /reset" in done.stderr
    last = [m["content"] for m in scripted.asked[3][2]["messages"]]  # type: ignore[attr-defined,index]
    assert last == ["Be kind.", "two", "Hi.", "three"]
    assert alone.returncode == 1 and "too long by far" in alone.stderr


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    with server(stream("a\x1b[2Jb\x07\n\tc")) as scripted:
        assert talk(scripted.url, "one\n").stdout == "a[2Jb\n\tc\n"


def test_server_flags_are_refused_when_a_server_runs_already() -> None:
    done = talk("http://127.0.0.1:9", "", "--page-size", "32")
    assert done.returncode == 2 and "--page-size goes to a server" in done.stderr


class Screen:
    """`banyan chat` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._controller, terminal = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "banyan", "chat", *words],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def wait(self, text: str) -> None:
        """Until `text` was shown; what was shown before it is forgotten."""
        deadline = time.monotonic() + 60
        while text.encode() not in self._seen:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._controller], [], [], max(0, left))
            assert ready, f"{text!r} was not shown, but {self._seen!r}"
            self._seen += os.read(self._controller, 4096)
        self._seen = self._seen.partition(text.encode())[2]

    def close(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._controller)


needs_readline = pytest.mark.skipif(not find_spec("readline"), reason="this Python has no readline")


@needs_readline
def test_lines_are_edited_earlier_ones_come_back_and_a_paste_is_one_question() -> None:
    with server(stream("Hi.")) as scripted:
        screen = Screen("--url", scripted.url)
        screen.wait("> ")
        screen.type("wo\x1b[D\x1b[Dt\x1b[F!\r")
        screen.wait("tokens")
        screen.wait("> ")
        screen.type("\x1b[A\r")
        screen.wait("tokens")
        screen.wait("> ")
        screen.type("\x1b[200~first\nsecond\nthird\x1b[201~\r")
        screen.wait("tokens")
        screen.wait("> ")
        screen.type("\x04")
        assert screen.close() == 0
    asked = [body["messages"][-1]["content"] for _, _, body in scripted.asked]  # type: ignore[index]
    assert asked == ["two!", "two!", "first\nsecond\nthird"]


def test_a_stopped_answer_does_not_count_to_leaving() -> None:
    with server(stream("Once", end="")) as scripted:
        scripted.is_endless = True
        screen = Screen("--url", scripted.url)
        screen.wait("> ")
        screen.type("tell\r")
        screen.wait("Once")
        screen.type("\x03")
        screen.wait("[stopped]")
        screen.wait("> ")
        screen.type("half a line")
        screen.wait("half a line")
        screen.type("\x03")
        screen.wait("(Ctrl-C again to leave)")
        screen.wait("> ")
        assert screen.process.poll() is None
        screen.type("other")
        screen.wait("other")
        screen.type("\x03")
        assert screen.close() == 0
    assert len(scripted.asked) == 1


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
        assert scripted.was_left.wait(60)
        scripted.is_endless = False
        scripted.answer = stream("End.")
        rest, _ = chat.communicate(b"more\n/quit\n", timeout=60)
    assert (rest, chat.returncode) == (b"\nEnd.\n", 0)
    said = [m["content"] for m in scripted.asked[1][2]["messages"]]  # type: ignore[attr-defined,index]
    assert said == ["tell", "Once", "more"]
