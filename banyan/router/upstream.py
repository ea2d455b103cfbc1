"""Connections to one worker over HTTP/1.1, and the limits on what a worker may send. h11 parses.

Connections are kept alive, responses are relayed as they arrive, and a worker is read no faster
than its client reads.

A connection is reused only if both sides finished the exchange and no bytes follow it. So a
response cannot reach the client of the next request.

Errors say whether the worker can have started the request: WorkerUnreachable or WorkerLost.
"""

import asyncio
import contextlib
import select
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import h11

from banyan.base.errors import BanyanError, ConfigError, RequestError
from banyan.base.log import printable

Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")

MOST_AHEAD = 256 << 10
"""Bytes of a response that wait for the client; reading resumes when half of them are gone."""
MAX_IDLE = 256
"""Idle connections that are kept."""
MAX_KEPT_S = 4.0
"""Seconds an idle connection is kept. Servers close theirs: Banyan after 30 s, SGLang after 5."""


MAX_HEAD_BYTES = 32 << 10
"""Limit of the heads of a response, interim ones included, and of its trailers. A head that arrives
in one packet with the beginning of its body may have `FEED_BYTES` more."""
MAX_HEADERS = 256
MAX_INTERIM = 32
"""Interim answers (1xx) before the final one."""
FEED_BYTES = 8 << 10
"""Most bytes fed at a time, so that one call takes a few milliseconds at most."""
MOST_EVENTS = 512
"""Body parts that one call parses. A part takes about 7 µs, even if it has one byte."""
MOST_PIECE_BYTES = 64 << 10
_REASON_CHARS = 200


class WorkerUnreachable(BanyanError):
    """The request did not reach the worker, so it can be sent to another one."""


class WorkerLost(BanyanError):
    """The worker or its connection ended before the response did."""


class BadResponse(BanyanError):
    """A worker sent an invalid HTTP response, or more than is accepted."""


class UpstreamResponse:
    """The head of a response, and its body as it arrives. Read it to the end or `close` it."""

    def __init__(self, connection: "_Connection", status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._is_over = False

    def header(self, name: bytes) -> bytes:
        return next((value for given, value in self.headers if given == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives; WorkerLost if it breaks off."""
        while piece := await self._connection.next_piece():
            yield piece
        self._is_over = True
        self._connection.give_back()

    async def whole(self, most: int) -> bytes:
        """The whole body; WorkerLost if it breaks off or has more than `most` bytes."""
        parts: list[bytes] = []
        size = 0
        try:
            async for piece in self.pieces():
                size += len(piece)
                if size > most:
                    raise WorkerLost(f"the worker's answer has more than {most} bytes")
                parts.append(piece)
        finally:
            self.close()
        return b"".join(parts)

    def close(self) -> None:
        """Stop reading: the worker sees that its client has gone. No effect after the end."""
        if not self._is_over:
            self._is_over = True
            self._connection.close()


class Upstream:
    """The address of a worker and the connections to it.

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
        self._idle: dict[_Connection, None] = {}
        """Oldest first."""
        self._busy: set[_Connection] = set()

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> UpstreamResponse:
        """Send a request and wait for the head of the response.

        Args:
            headers: names in lower case, without host and content-length.

        Raises:
            WorkerUnreachable, WorkerLost.
            RequestError: 400; HTTP cannot carry the target or a header.
        """
        lines = [(b"host", self._name), *headers]
        if body or method not in ("GET", "HEAD", "DELETE"):
            lines.append((b"content-length", b"%d" % len(body)))
        connection = await self._connection()
        try:
            return await connection.exchange(method, target, lines, body)
        except BaseException:
            connection.close()
            raise

    def cut(self) -> None:
        """Close all connections, because the worker does not answer."""
        for connection in [*self._idle, *self._busy]:
            connection.close("the worker no longer answers")
        self._idle.clear()

    async def _connection(self) -> "_Connection":
        """The most recently used idle connection, or a new one."""
        while self._idle:
            kept, _ = self._idle.popitem()
            if kept.take():
                self._busy.add(kept)
                return kept
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await loop.create_connection(
                    lambda: _Connection(self._take_back), self.host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise WorkerUnreachable(f"no connection within {self._connect_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise WorkerUnreachable(f"no connection: {error}") from None
        self._busy.add(made)
        return made

    def _take_back(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        self._idle.pop(connection, None)
        if not connection.is_usable:
            return
        if len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        self._idle[connection] = None
        connection.keep()


def checked_url(url: str) -> str:
    """`url` as http(s)://host[:port]; ConfigError otherwise."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        has_rest = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        is_http = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_http and not has_rest and url.isascii() and url.isprintable() and " " not in url:
            return f"{parts.scheme}://{parts.netloc}"
    raise ConfigError(
        f"{printable(url, 100)!r} is no address of a worker", hint="Give it as http://host:port"
    )


class _Connection(asyncio.Protocol):
    """One socket; one exchange at a time.

    Args:
        over: called when an exchange has ended in order, and when the connection is lost.
    """

    def __init__(self, over: Callable[["_Connection"], None]) -> None:
        self._over = over
        self._transport: asyncio.Transport | None = None
        self._is_busy = False
        self._expiry: asyncio.TimerHandle | None = None
        """Closes the connection when it has been idle too long."""
        self._start_over()

    def _start_over(self) -> None:
        self._reader = ResponseReader()
        self._received: deque[bytes | memoryview] = deque()
        """Received bytes that have not been fed to the reader."""
        self._num_received = 0
        self._is_paused = False
        self._is_early = False
        """The response began before the whole request was written."""
        self._trouble = ""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and idle."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._is_busy

    def keep(self) -> None:
        """Keep the connection for the next exchange; close it after MAX_KEPT_S or on any data."""
        self._expiry = asyncio.get_running_loop().call_later(MAX_KEPT_S, self.close)

    def take(self) -> bool:
        """Take an idle connection for an exchange; False if it can no longer be used."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.is_usable and not self._has_unread():
            return True
        self.close()
        return False

    def _has_unread(self) -> bool:
        """Whether data or an end of file waits in the socket."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def exchange(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamResponse:
        """Send a request; the response, once its head has arrived.

        Raises:
            WorkerUnreachable, WorkerLost.
        """
        if not self.is_usable:
            raise WorkerUnreachable(self._trouble or "the worker closed the connection at once")
        assert self._transport is not None
        self._start_over()
        try:
            raw = self._reader.request(method, target, headers, body)
        except h11.LocalProtocolError as error:
            raise RequestError(f"HTTP cannot carry this request: {error}") from None
        self._is_busy = True
        self._transport.writelines(raw)
        while (head := self._read(self._reader.head)) is None:
            await self._feed()
        transport = self._transport
        self._is_early = transport is None or transport.get_write_buffer_size() > 0
        return UpstreamResponse(self, head.status, head.headers)

    async def next_piece(self) -> bytes:
        """The next bytes of the body; b"" at its end. WorkerLost if it breaks off."""
        reader = self._reader
        while not reader.is_over:
            if reader.num_events >= MOST_EVENTS:
                reader.num_events = 0
                await asyncio.sleep(0)  # a body of many small parts must not block the loop
            if piece := self._read(reader.piece):
                return piece
            if reader.is_hungry:
                await self._feed()
        return b""

    def _read(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BadResponse as error:
            self.close(f"the worker's answer is refused: {error}")
            raise WorkerLost(self._trouble) from None

    async def _feed(self) -> None:
        """Feed the reader, after waiting for data if there is none."""
        while not self._received:
            if self._trouble:
                raise WorkerLost(self._trouble)
            if self._transport is None:
                if not self._reader.has_head:
                    raise WorkerLost("the worker closed the connection before it answered")
                self._reader.feed(b"")
                return
            self._reader.num_events = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._received.popleft()
        if len(data) > FEED_BYTES:
            self._received.appendleft(memoryview(data)[FEED_BYTES:])
            data = memoryview(data)[:FEED_BYTES]
        self._num_received -= len(data)
        if self._is_paused and self._num_received <= MOST_AHEAD // 2:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        self._reader.feed(bytes(data))

    def give_back(self) -> None:
        """Release the connection at the end of a response; keep it if it is clean."""
        self._is_busy = False
        if self._received or self._is_early or not self._reader.is_clean:
            self.close()
        self._over(self)

    def close(self, why: str = "the connection was given up") -> None:
        """Close the connection now; an exchange in progress is lost."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._trouble = self._trouble or why
        self._received.clear()
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self.close("the worker sent something that nobody asked for")
            return
        self._received.append(data)
        self._num_received += len(data)
        if self._num_received > MOST_AHEAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._trouble = self._trouble or f"the connection to the worker broke: {exc}"
        self._transport = None
        self._wake()
        self._over(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True)
class ResponseHead:
    """Status, and headers with names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]


class ResponseReader:
    """Writes one request and reads its response. Each exchange needs a new reader."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._head_bytes = 0
        self.has_head = False
        self._num_interim = 0
        self.is_over = False
        """The response has been read to its end."""
        self.is_hungry = False
        """Everything that was fed has been read."""
        self.num_events = 0
        """Body parts so far, or since the caller reset it to 0."""

    def request(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> list[bytes]:
        """The bytes of a request.

        Args:
            headers: with host and, if there is a body, content-length.

        Raises:
            h11.LocalProtocolError: HTTP cannot carry the target or a header.
        """
        send = self._http.send_with_data_passthrough
        parts = send(h11.Request(method=method, target=target, headers=headers)) or []
        if body:
            parts += send(h11.Data(data=body)) or []
        parts += send(h11.EndOfMessage()) or []
        return parts

    def feed(self, data: bytes) -> None:
        """Add bytes from the worker, at most FEED_BYTES; b"" = the worker closed the connection
        after the head."""
        self.is_hungry = False
        if not self.has_head:
            self._head_bytes += len(data)
        self._http.receive_data(data)

    def head(self) -> ResponseHead | None:
        """The head of the final response; None = more must be fed.

        Raises:
            BadResponse: the response is invalid.
        """
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                if self._head_bytes > MAX_HEAD_BYTES:
                    raise BadResponse(f"its head has more than {MAX_HEAD_BYTES} bytes")
                return None
            if isinstance(event, h11.InformationalResponse):
                self._skip(event.status_code)
                continue
            assert isinstance(event, h11.Response)
            self.has_head = True
            return _checked(event)

    def piece(self) -> bytes:
        """The next bytes of the body; b"" = none yet, or the end.

        Raises:
            BadResponse: the body is incomplete.
        """
        parts: list[bytes] = []
        size = 0
        for _ in range(MOST_EVENTS):
            event = self._next()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(parts[-1])
                self.num_events += 1
                if size >= MOST_PIECE_BYTES:
                    break
            else:
                self.is_over = isinstance(event, h11.EndOfMessage)
                self.is_hungry = not self.is_over
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def is_clean(self) -> bool:
        """Whether the connection can be reused: both sides are done and no bytes follow."""
        http = self._http
        is_done = http.our_state is h11.DONE and http.their_state is h11.DONE
        return is_done and http.trailing_data == (b"", False)

    def _next(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise BadResponse(printable(str(error), _REASON_CHARS)) from None

    def _skip(self, status: int) -> None:
        """Skip an interim response; the final one follows."""
        self._num_interim += 1
        if status == 101:
            raise BadResponse("it switched to another protocol, which nobody asked for")
        if self._num_interim > MAX_INTERIM:
            raise BadResponse(f"it sent more than {MAX_INTERIM} interim answers")


def _checked(event: h11.Response) -> ResponseHead:
    """The head, if its status and framing can be relayed; BadResponse otherwise."""
    headers = list(event.headers)
    if not 200 <= event.status_code <= 599:
        raise BadResponse(f"{event.status_code} is no status of an answer")
    if len(headers) > MAX_HEADERS:
        raise BadResponse(f"it has {len(headers)} headers; {MAX_HEADERS} are accepted")
    names = {name for name, _ in headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise BadResponse("it has both content-length and transfer-encoding")
    return ResponseHead(event.status_code, headers)
