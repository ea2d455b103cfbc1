"""A small HTTP client of a running server, for the terminal. Standard library only."""

import http.client
import json
import urllib.parse
from collections.abc import Iterator

from banyan.base.errors import BanyanError, ConfigError

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 600.0


class Client:
    """One server.

    Args:
        url: http://host:port, with an optional path in front of /v1.
        api_key: sent as a bearer token; "" for none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r} is not http://host:port")
        self.url = url
        self._parts = parts
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

    def post(self, route: str, body: dict[str, object]) -> str:
        """What a route answers.

        Raises:
            BanyanError: the server cannot be reached, or refuses.
        """
        connection = self._connect(_ANSWER_TIMEOUT_S)
        try:
            raw = json.dumps(body).encode()
            connection.request("POST", self._path(route), raw, self._headers)
            response = connection.getresponse()
            text = response.read(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            raise BanyanError(
                f"{self.url} does not answer: {error}", hint="is the server running?"
            ) from None
        finally:
            connection.close()
        if response.status != 200:
            raise BanyanError(_error_text(text, response.status))
        return text.decode(errors="replace")

    def answer(self, body: dict[str, object]) -> Iterator[str]:
        """Pieces of the answer to one chat-completion request, as they come.

        Closing the iterator closes the connection, which makes the server stop generating.

        Raises:
            BanyanError: the server cannot be reached, refuses, or fails while it answers.
        """
        connection = self._connect(_ANSWER_TIMEOUT_S)
        try:
            raw = json.dumps({**body, "stream": True}).encode()
            path = self._path("/v1/chat/completions")
            connection.request("POST", path, raw, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise BanyanError(_error_text(response.read(1 << 16), response.status))
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise BanyanError(
                f"{self.url} does not answer: {error}", hint="is the server running?"
            ) from None
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=timeout_s)

    def _path(self, route: str) -> str:
        return self._parts.path.rstrip("/").removesuffix("/v1") + route


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The content deltas of a server-sent event stream of chat-completion chunks."""
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
            raise BanyanError(_error_text(event, 500))
        for choice in chunk.get("choices", ()):
            piece = choice.get("delta", {}).get("content")
            if piece:
                yield piece
    raise BanyanError("the stream ended before the answer did", hint="the server may have died")


def _error_text(raw: bytes, status: int) -> str:
    try:
        error = json.loads(raw)
        while isinstance(error, dict) and isinstance(error.get("error"), dict | str):
            error = error["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError):
        text = raw[:200].decode(errors="replace").strip()
    return f"the server answered {status}: {text}"
