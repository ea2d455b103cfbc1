"""An HTTP client of a running server for the terminal, private servers, and `banyan profile`.

Standard library only. A private server is a child process that ends with its command.
"""

import argparse
import http.client
import json
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from banyan.base.child_process import Child, read_process_spec, spawn, watch_parent
from banyan.base.errors import BanyanError, ConfigError, DeviceError
from banyan.bench.options import CACERT
from banyan.config.env import read_environment

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0
_MAX_BYTES = 1 << 16
_MAX_FILE_BYTES = 1 << 32
_POLL_S = 0.05
_HOUR_S = 3600.0


class Refused(BanyanError):
    """An answer of the server that is an error; `code` is the server's word for it."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class AnswerPiece:
    """Part of an answer: text, finish reason or length.

    Attributes:
        thought: reasoning text.
        finish: "stop", "length" …; "" = it goes on.
        tokens: tokens of the whole answer, as the server counts; 0 = unknown.
    """

    text: str = ""
    finish: str = ""
    tokens: int = 0
    thought: str = ""


@dataclass(frozen=True)
class Served:
    """What a server says it serves.

    Attributes:
        model: "" = it does not say.
        context: most tokens of a talk, 0 = it does not say.
    """

    model: str = ""
    context: int = 0


class Client:
    """One server.

    Args:
        url: http://host:port, with an optional path in front of /v1.
        api_key: sent as a bearer token; "" for none.
        cacert: file of the certificates that are trusted; "" = the system's.

    Raises:
        ConfigError: no such address, or no such file.
    """

    def __init__(self, url: str, api_key: str = "", cacert: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not http://host:port")
        self.url = url
        self._parts = parts
        self._tls = _trust(cacert) if parts.scheme == "https" else None
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def is_healthy(self) -> bool:
        try:
            connection = self._connect(_CONNECT_TIMEOUT_S)
            connection.request("GET", self._path("/health"), headers=self._headers)
            is_healthy = connection.getresponse().status == 200
            connection.close()
        except (OSError, http.client.HTTPException):
            return False
        return is_healthy

    def served(self) -> Served:
        """The first model that the server lists.

        Raises:
            BanyanError: it cannot be reached, or refuses.
        """
        status, raw = self._exchange("GET", "/v1/models", None, _CONNECT_TIMEOUT_S)
        if status in (404, 405, 501):
            return Served()  # a server that lists none may chat all the same
        if status != 200:
            raise _refusal(raw, status)
        try:
            first = json.loads(raw)["data"][0]
            return Served(str(first["id"]), int(first.get("max_model_len") or 0))
        except (ValueError, LookupError, TypeError, AttributeError):
            return Served()

    def post(self, route: str, body: dict[str, object]) -> str:
        """What a route answers.

        Raises:
            BanyanError: the server cannot be reached, or refuses.
        """
        status, raw = self._exchange("POST", route, json.dumps(body).encode(), _ANSWER_TIMEOUT_S)
        if status != 200:
            raise _refusal(raw, status)
        return raw.decode(errors="replace")

    def download(self, route: str) -> bytes:
        """A whole file that a route gives.

        Raises:
            BanyanError: the server cannot be reached, or refuses.
        """
        status, raw = self._exchange("GET", route, None, _ANSWER_TIMEOUT_S, _MAX_FILE_BYTES)
        if status != 200:
            raise _refusal(raw, status)
        return raw

    def _exchange(
        self,
        method: str,
        route: str,
        body: bytes | None,
        timeout_s: float,
        most: int = _MAX_BYTES,
    ) -> tuple[int, bytes]:
        connection = self._connect(timeout_s)
        try:
            connection.request(method, self._path(route), body, self._headers)
            response = connection.getresponse()
            return response.status, response.read(most)
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error) from None
        finally:
            connection.close()

    def _silence(self, error: Exception) -> BanyanError:
        hint = "is the server running?"
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "give the certificate of its authority: --cacert FILE.pem"
        return BanyanError(f"{self.url} does not answer: {error}", hint=hint)

    def answer(self, body: dict[str, object]) -> Generator[AnswerPiece, None, None]:
        """The answer to one chat-completion request, as it comes.

        Closing the iterator closes the connection, which makes the server stop generating.

        Raises:
            BanyanError: the server cannot be reached, refuses, or fails while it answers.
        """
        connection = self._connect(_ANSWER_TIMEOUT_S)
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            raw = json.dumps({**body, **counted}).encode()
            path = self._path("/v1/chat/completions")
            connection.request("POST", path, raw, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.read(_MAX_BYTES), response.status)
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error) from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)

    def _path(self, route: str) -> str:
        return self._parts.path.rstrip("/").removesuffix("/v1") + route


def _trust(cacert: str) -> ssl.SSLContext:
    from banyan.bench.http import trust

    return trust(cacert)


def _pieces(response: http.client.HTTPResponse) -> Iterator[AnswerPiece]:
    """What a server-sent event stream of chat-completion chunks says."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        event = line[5:].strip()
        if event == b"[DONE]":
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            raise BanyanError("the server sent an event that is not JSON") from None
        if "error" in chunk:
            raise _refusal(event, 500)
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
            finish = choice.get("finish_reason") or ""
            if text or thought or finish:
                yield AnswerPiece(text, finish, thought=thought)
        if tokens := (chunk.get("usage") or {}).get("completion_tokens"):
            yield AnswerPiece(tokens=tokens)
    raise BanyanError("the stream ended before the answer did", hint="the server may have died")


def _refusal(raw: bytes, status: int) -> Refused:
    """The server's own words, from whichever shape of error it sent."""
    code = ""
    try:
        error = json.loads(raw)
        while isinstance(error, dict) and isinstance(error.get("error"), dict | str):
            error = error["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
        code = str(error.get("code", "")) if isinstance(error, dict) else ""
    except (ValueError, KeyError):
        text = raw[:200].decode(errors="replace").strip()
    return Refused(f"the server answered {status}: {text}", code)


@contextmanager
def private_server(argv: Sequence[str]) -> Iterator[Client]:
    """A server started with `argv` on a free loopback port, stopped at the end of the block."""
    port = free_port()
    words = [*argv, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    child = spawn("banyan.cli.client", "server", json.dumps(words).encode())
    client = Client(f"http://127.0.0.1:{port}")
    try:
        _wait_until_healthy(child, client)
        yield client
    finally:
        child.stop()


def _wait_until_healthy(child: Child, client: Client) -> None:
    """However long it takes: a download or a first compilation shows by itself that it goes on."""
    while not client.is_healthy():
        if not child.is_alive():
            raise DeviceError("the server did not start", hint="see its message above")
        time.sleep(_POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def profile(argv: Sequence[str]) -> int:
    """Start, wait, stop; prints where the server has put the file."""
    options = _parser().parse_args(list(argv))
    if not 0 < options.seconds <= _HOUR_S:
        raise ConfigError(f"--seconds must be in (0, {_HOUR_S:g}], got {options.seconds:g}")
    given = options.api_key or read_environment().flags.get("admin-api-key", "")
    key = given or read_environment().flags.get("api-key", "")
    client = Client(options.url, key, options.cacert)
    folder = {"output_dir": options.output_dir} if options.output_dir else {}
    print(client.post("/start_profile", folder).strip(), flush=True)
    try:
        time.sleep(options.seconds)
    finally:
        print(client.post("/stop_profile", {}).strip())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "banyan profile",
        description="Record the steps of a running server. The file, on the server's machine, is "
        "for chrome://tracing or ui.perfetto.dev.",
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--output-dir", default="", help="folder on the server's machine")
    parser.add_argument("--api-key", default="", help="default: $BANYAN_ADMIN_API_KEY")
    parser.add_argument("--cacert", default="", help=CACERT)
    return parser


def _child() -> int:
    from banyan.cli.main import main

    # A group of its own: Ctrl-C in the terminal stops the answer, not the server.
    os.setpgrp()
    words = json.loads(read_process_spec())
    watch_parent()
    return main(["serve", *words])


if __name__ == "__main__":
    try:
        raise SystemExit(_child())
    except BanyanError as error:
        raise SystemExit(error.exit_code) from None
