"""Upstream: the way to one worker. HTTP/1.1 over asyncio protocols and httptools, the parser of the
server's own side: connections are kept, answers are handed on as they arrive, and a worker is read
no faster than its client reads.

Knows no API. What goes wrong is told apart by whether the worker can have begun.
"""

import asyncio
import contextlib
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import httptools

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import printable

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 << 10
"""Of an answer's headers."""
MOST_AHEAD = 256 << 10
"""Bytes of an answer that wait for its client; no more is read until half of them are gone."""
MAX_IDLE = 256
"""Connections that are kept for later."""
MAX_KEPT_S = 4.0
"""For how long. Servers close what is idle: ours after 30 s, those of SGLang after 5."""


class NotReached(BanyanError):
    """The request never came to the worker: it can be sent to another one."""


class Lost(BanyanError):
    """The worker, or its connection, ended before its answer did."""


class Answer:
    """The head of an answer, and its body as it comes. Somebody must read it to the end or `close`
    it."""

    def __init__(self, connection: "_Connection", status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._is_over = False

    def header(self, name: bytes) -> bytes:
        return next((value for given, value in self.headers if given == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Lost: it broke off."""
        while piece := await self._connection.next_piece():
            yield piece
        self._is_over = True
        self._connection.give_back()

    async def whole(self, most: int) -> bytes:
        """The whole body. Lost: it broke off, or has more than `most` bytes."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            size += len(piece)
            if size > most:
                self.close()
                raise Lost(f"the worker's answer has more than {most} bytes")
            parts.append(piece)
        return b"".join(parts)

    def close(self) -> None:
        """Take no more of it: the worker sees that its client has gone. Harmless at its end."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


class Upstream:
    """One worker's address, and the connections to it.

    Args:
        url: http(s)://host:port, without a path.
    """

    def __init__(self, url: str, connect_s: float = 5.0) -> None:
        self.url = checked_url(url)
        parts = urllib.parse.urlsplit(self.url)
        assert parts.hostname is not None
        self.host: str = parts.hostname
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._tls = ssl.create_default_context() if self._is_tls else None
        self._name = parts.netloc.encode("ascii")
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes = b"") -> Answer:
        """Send a request and wait for the head of its answer.

        Args:
            headers: names in lower case, without host and content-length.

        Raises:
            NotReached, Lost.
        """
        raw = self._head(method, target, headers, len(body))
        connection = await self._connection()
        try:
            return await connection.context(raw, body)
        except BaseException:
            connection.close()
            raise

    def cut(self) -> None:
        """End what is open: the worker does not answer."""
        for connection in [*self._idle, *self._busy]:
            connection.close("the worker no longer answers")
        self._idle.clear()

    def _head(self, method: str, target: bytes, headers: Headers, size: int) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + self._name]
        lines += [b"%b: %b" % line for line in headers]
        if size or method not in ("GET", "HEAD", "DELETE"):
            lines.append(b"content-length: %d" % size)
        return b"\r\n".join([*lines, b"", b""])

    async def _connection(self) -> "_Connection":
        """A kept one that the worker will not just be closing, or a fresh one."""
        while self._idle:
            kept = self._idle.pop()
            if kept.is_usable and time.monotonic() - kept.since_s < MAX_KEPT_S:
                self._busy.add(kept)
                return kept
            kept.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await loop.create_connection(
                    lambda: _Connection(self._take_back), self.host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise NotReached(f"no connection within {self._connect_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise NotReached(f"no connection: {error}") from None
        self._busy.add(made)
        return made

    def _take_back(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        if connection.is_usable:
            connection.since_s = time.monotonic()
            self._idle.append(connection)
            if len(self._idle) > MAX_IDLE:
                self._idle.pop(0).close()


def checked_url(url: str) -> str:
    """`url` as http(s)://host[:port]; ConfigError otherwise."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        has_rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        is_http = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_http and not has_rest and url.isascii() and url.isprintable() and " " not in url:
            return f"{parts.scheme}://{parts.netloc}"
    raise ConfigError(
        f"{printable(url, 100)!r} is no address of a worker", hint="Give it as http://host:port"
    )


class _Connection(asyncio.Protocol):
    """One socket; one exchange at a time.

    Args:
        over: called when an exchange has ended, however it did.
    """

    def __init__(self, over: Callable[["_Connection"], None]) -> None:
        self._over = over
        self._transport: asyncio.Transport | None = None
        self._is_busy = True
        self.since_s = 0.0
        """When it was kept."""
        self._start_over()

    def _start_over(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._pieces: deque[bytes] = deque()
        self._ahead = 0
        self._has_head = self._is_whole = self._is_framed = self._keeps = False
        self._trouble = ""
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False

    @property
    def is_usable(self) -> bool:
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._is_busy

    async def context(self, head: bytes, body: bytes) -> Answer:
        """Send a request; its answer once the head of that is here. Lost: it never came."""
        assert self._transport is not None
        self._start_over()
        self._is_busy = True
        self._transport.writelines((head, body) if body else (head,))
        while not self._has_head:
            if self._trouble:
                raise Lost(self._trouble)
            await self._news()
        return Answer(self, self._parser.get_status_code(), self._headers)

    async def next_piece(self) -> bytes:
        """What has come of the body; b"" at its end. Lost: it broke off."""
        while not self._pieces:
            if self._is_whole:
                return b""
            if self._trouble:
                raise Lost(self._trouble)
            await self._news()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._ahead = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    def give_back(self) -> None:
        """The answer has been read to its end."""
        self._is_busy = False
        if not self._keeps:
            self.close()
        self._over(self)

    def close(self, why: str = "the connection was given up") -> None:
        self._trouble = self._trouble or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self.close("the worker sent something that nobody asked for")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"the worker's answer is not HTTP: {error}")
        if self._ahead > MOST_AHEAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and not self._is_framed and exc is None and not self._trouble:
            self._is_whole = True  # an answer without a length ends with its connection
        where = "in the middle of its answer" if self._has_head else "before it answered"
        self._trouble = self._trouble or f"the worker closed the connection {where}"
        self._transport = None
        self._wake()
        self._over(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.close(f"the worker's answer has headers of more than {MAX_HEAD_BYTES} bytes")
            return
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._ahead += len(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._is_framed = True
        self._keeps = self._parser.should_keep_alive()

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
