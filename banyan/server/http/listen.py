"""The HTTP listener: the bound socket, the check of who can reach it, and uvicorn's connections.

Headers have a time limit and a size limit. So does everything else that is not a body: trailers,
and the start of a request that follows one still being answered. A handler may cut its connection
at once (`ABORT` in the scope), which drops the data that a client never reads, and may write a
piece of its answer without waiting (`WRITE`).

A step of the engine produces events for many streams. The system call of a write wakes the client
and evicts this process's caches and branch predictions. So all events of one iteration of the event
loop are made first and then sent one after the other.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.log import logger
from banyan.base.os import is_loopback
from banyan.config.schema import ServerConfig
from banyan.server.http.app import App
from banyan.server.http.auth import ANY
from banyan.server.http.exchange import ABORT, WRITE, Scope
from banyan.server.http.tls import tls_context

log = logger(__name__)

_USER_TIMEOUT_MS = 60_000
"""The kernel drops a connection whose client acknowledges nothing for this long."""

_BACKLOG = 2048

CLOSING_S = 1.0
"""Time for last events to reach clients and for connections to close."""


HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_CONNECTIONS = 10_000
"""Open connections of one server; further ones are cut at once."""


MAX_HELD_BYTES = 64 << 10
"""Most bytes that a connection holds back. More are written at once, so that it is noticed when the
client's buffer is full."""

DRAIN_S, DRAIN_REFUSED_S = 30.0, 2.0
MAX_DRAINED_BYTES = 256 << 20
"""Bounds of what is received and dropped after a response, which the client may read only when its
body is sent: closing at once would reset the connection, and the response would be lost."""

Application = Callable[..., Awaitable[Any]]


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket on the configured address."""
    where = f"{server.host}:{server.port}"
    try:
        found = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
    except OSError as error:
        raise ConfigError(
            f"--host {server.host!r} is no address of this machine: {error}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"{where} is in use", hint="Stop what listens there, or choose another --port"
            ) from None
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    listener.setblocking(False)
    return listener


def check_exposure(server: ServerConfig) -> None:
    """Warn if anyone else can reach a server without a key.

    Raises:
        ConfigError: under --require-key.
    """
    if server.has_keys:
        return
    if ANY in server.allowed_origins:
        log.warning("any web page in a browser here can use this server; give --api-key as well")
    if is_loopback(server.host):
        return
    advice = "Give --api-key, or bind --host 127.0.0.1"
    if server.require_key:
        raise ConfigError(f"--host {server.host} without a key, under --require-key", hint=advice)
    rule = "!" * 78
    for line in (rule, f"Anyone who reaches {server.host} can use this server. {advice}.", rule):
        log.warning("%s", line)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers; the server process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def web_server(
    app: Application,
    keep_alive_s: int,
    closing_s: float,
    encryption: ssl.SSLContext | None = None,
) -> uvicorn.Server:
    """uvicorn over `app`; `serve([listener])` runs it until `should_exit`.

    Args:
        closing_s: time for connections to close in order.
        encryption: None = no TLS.
    """
    config = uvicorn.Config(
        app,
        http=connections(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=int(closing_s),
    )
    config.load()
    config.ssl = encryption
    return _Uvicorn(config)


class HttpListener:
    """Serves `app` over HTTP on a bound socket.

    Raises:
        ConfigError: from the constructor, if the TLS files or flags are wrong.
    """

    def __init__(self, app: App[Any], listener: socket.socket, server: ServerConfig) -> None:
        self.app = app
        self.web = web_server(app, server.keep_alive_s, CLOSING_S, tls_context(server))
        self.url = address_of(listener, server.host, server.scheme)
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self.web.serve([self._listener]))

    async def drain(self) -> None:
        await self.app.wait_idle()

    def end_all(self, text: str) -> None:
        self.app.end_all(text)

    async def stop(self, is_now: bool) -> None:
        self.web.should_exit = True
        self.web.force_exit = is_now
        if self._serving is not None:
            await self._serving


def address_of(listener: socket.socket, host: str, scheme: str) -> str:
    """The URL of a bound socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listener.getsockname()[1]}"


class WriteBatch:
    """The connections that hold writes back until the end of this iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def add(self, transport: "BatchedTransport", loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._end)
        self._waiting.append(transport)

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class BatchedTransport(asyncio.Transport):
    """Holds the writes of another transport back, and passes everything on in order.

    Args:
        inner: the transport of the connection.
        batch: shared by the connections of `loop`; all calls are made on that loop.
        drain: called by `close`. If it returns True, the client is still sending: only the
            sending side ends, and `drain` has arranged for `end` or `abort`.
    """

    def __init__(
        self,
        inner: asyncio.Transport,
        batch: WriteBatch,
        loop: asyncio.AbstractEventLoop,
        drain: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._drain = drain
        self._is_half_closed = False
        self._batch = batch
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._batch.add(self, self._loop)
        self._held.append(data if isinstance(data, bytes) else bytes(data))
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the bytes that are held back."""
        held = self._held
        if held:
            self._held, self._held_bytes = [], 0
            if self.is_closing():
                return  # uvloop's transport raises when its client has gone
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self.flush()
        if self.is_closing():
            return
        if self._drain is None or not self._drain():
            self._inner.close()
            return
        self._is_half_closed = True
        if self._inner.can_write_eof():  # not with TLS
            self._inner.write_eof()

    def end(self) -> None:
        """Close when everything is written, whatever the client still sends."""
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        self._held, self._held_bytes = [], 0
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._is_half_closed or self._inner.is_closing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._held_bytes + self._inner.get_write_buffer_size()


class Connection(HttpToolsProtocol):
    """One client connection."""

    batch: WriteBatch
    """Shared by the connections of one server."""
    _deadline: asyncio.TimerHandle | None = None
    _num_pending = 0
    """Bytes since the last ones that were part of a body, or ended headers or a request."""
    _trailer_bytes = 0
    _drained_bytes = 0
    _in_body = False
    """Between the headers of a request and its end."""
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        batched = BatchedTransport(transport, self.batch, self.loop, self._begin_drain)
        super().connection_made(batched)
        if len(self.connections) > MAX_CONNECTIONS:
            self._is_refused = True
            transport.abort()
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._is_refused or (self._in_body and (is_answered or self.transport.is_closing())):
            self._drain(len(data))
        elif is_answered and self._deadline is None:
            self._start_header_timer()
        if self._is_refused:
            return
        self._num_pending += len(data)
        super().data_received(data)
        if max(self._num_pending, self._trailer_bytes) > MAX_HEADER_BYTES:
            self._refuse(f"headers of more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._trailer_bytes = self._drained_bytes = 0
        super().on_message_begin()
        cast(Scope, self.scope)[ABORT] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)
        else:  # a trailer, which is ignored
            self._trailer_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._num_pending, self._in_body = 0, True
        size = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        self._cancel_header_timer()
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse(
                f"{len(self.headers)} headers, {size} bytes; "
                f"at most {MAX_HEADERS} and {MAX_HEADER_BYTES} are accepted"
            )
            return
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["method"] != "HEAD":  # no HTTP: None
            cast(Scope, self.cycle.scope)[WRITE] = partial(_write, self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending, self._in_body = 0, False
        if self._is_refused:
            return
        self._cancel_header_timer()
        if self.transport.is_closing():  # the body of an answered request has ended
            self._is_refused = True
            cast(BatchedTransport, self.transport).end()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._in_body and self.cycle.response_complete:
            self._begin_drain()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._is_refused = True
        super().send_400_response(msg)

    def _begin_drain(self) -> bool:
        """Whether the client is still sending; if so, wait for the end of it for a bounded time."""
        if self._in_body or self._is_refused:
            self._cancel_header_timer()
            self.flow.resume_reading()
            self._drain(0)
            return True
        return False

    def _drain(self, size: int) -> None:
        """Drop bytes of a body after its response, within bounds."""
        self._drained_bytes += size
        if self._drained_bytes > MAX_DRAINED_BYTES:
            self.transport.abort()
        elif self._deadline is None:
            limit_s = DRAIN_REFUSED_S if self._is_refused else DRAIN_S
            self._deadline = self.loop.call_later(limit_s, self.transport.abort)

    def _start_header_timer(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_header_timeout(self) -> None:
        self._respond_and_close(b"408 Request Timeout", "the request headers did not come in time")

    def _refuse(self, why: str) -> None:
        self._respond_and_close(b"431 Request Header Fields Too Large", why)

    def _respond_and_close(self, status: bytes, text: str) -> None:
        self._cancel_header_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            # A response here would be read as part of the other answer.
            cast(BatchedTransport, self.transport).end()
            return
        body = text.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\nconnection: close\r\n" % status
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()


def connections() -> type[Connection]:
    """A connection class for one server, whose connections share a WriteBatch."""

    class ServerConnection(Connection):
        batch = WriteBatch()

    return ServerConnection


def _write(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """Write a piece of a chunked answer if the client's buffer is not full; False = not written.

    It does what `send` of the cycle does in that case, in a third of the time.
    """
    is_open = cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected)
    if not is_open or cycle.flow.write_paused or not piece:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True
