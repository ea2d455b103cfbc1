"""A small HTTP/1.1 client for load: raw asyncio protocols over httptools.

Data is only timestamped and stored when it arrives, and parsed later, so that one core can follow
many thousand streamed chunks per second.
"""

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import httptools

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import printable


class ExchangeError(BanyanError):
    """A request that got no complete response; the run continues."""


@dataclass
class HttpResponse:
    """A response as it arrived.

    Attributes:
        started: when the request began (before the connection was opened), perf_counter seconds.
        pieces: (arrival in perf_counter seconds, bytes of the body), in order.
    """

    started: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


def trust(cacert: str) -> ssl.SSLContext:
    """TLS that trusts the certificates in a PEM file (--cacert); "" = the ones of the system.

    Raises:
        ConfigError: the file is missing or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=cacert or None)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or "it holds no certificate"
        raise ConfigError(f"--cacert {printable(cacert)}: {why}") from None


class HttpClient:
    """Sends requests to one server over reused connections.

    Args:
        url: http(s)://host:port with an optional path in front of every route.
        headers: sent with every request.
        keep_alive: reuse a connection after a complete response.
        cacert: file of the certificates that are trusted; "" = the system's.

    Raises:
        ConfigError: no such address, or no such file.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = True,
        cacert: str = "",
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not http://host:port")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = trust(cacert) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        lines = {
            "host": parts.netloc,
            "content-type": "application/json",
            "connection": "keep-alive" if keep_alive else "close",
            **{name.lower(): text for name, text in (headers or {}).items()},
        }
        self._head = "".join(f"{name}: {text}\r\n" for name, text in lines.items())
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, route: str, body: bytes = b"", timeout_s: float | None = None
    ) -> HttpResponse:
        """Send a request and wait for the end of the response.

        Raises:
            ExchangeError: no connection, or no complete response within `timeout_s`.
        """
        head = f"{method} {self._prefix}{route} HTTP/1.1\r\n{self._head}"
        raw = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        reply = HttpResponse(time.perf_counter())
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                await connection.exchange(raw, reply)
        except TimeoutError:
            raise ExchangeError(f"no complete answer within {timeout_s:g} s") from None
        except OSError as error:
            raise ExchangeError(f"{self.url} does not answer: {error}") from None
        finally:
            if connection is not None:
                self._give_back(connection)
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle = []

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return made

    def _give_back(self, connection: "_Connection") -> None:
        if self._keep_alive and connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One socket; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: HttpResponse | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._ends_with_connection = False

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and idle."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._reply is None

    async def exchange(self, raw: bytes, reply: HttpResponse) -> None:
        """Fill `reply`; a connection interrupted in the middle of a response cannot be reused."""
        assert self._transport is not None and self._reply is None
        self._reply = reply
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        reply = self._reply
        if reply is not None and self._ends_with_connection and error is None:
            self._finish()
        elif reply is None or not reply.status:
            self._fail("the server closed the connection before it answered")
        else:
            self._fail("the server closed the connection in the middle of its answer")
        self._transport = None

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._finish()

    def _finish(self) -> None:
        self._reply = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, text: str) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeError(text))
