"""Connection: uvicorn's HTTP protocol with bounds on what a client may send before it is heard.

Headers must come whole within a time and a size, and so must everything else that is no body:
trailers, and the beginning of a request behind one that is still answered. A request may cut its
connection at once (`ABORT` in the scope), which drops what a client that never reads has left in
the buffer, and may write a piece of its answer without waiting (`WRITE`).
"""

import asyncio
from functools import partial
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from banyan.server.http.batched_writes import BatchedTransport, Turn
from banyan.server.http.exchange import ABORT, WRITE, Scope

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_CONNECTIONS = 10_000
"""Of one server at a time; one more is cut at once."""


class Connection(HttpToolsProtocol):
    """One client connection."""

    turn: Turn
    """Of the connections of one server."""
    _deadline: asyncio.TimerHandle | None = None
    _unheard = 0
    """Bytes since the last that were of a body or ended a request's head or a request."""
    _trailer_bytes = 0
    _in_head = True
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(BatchedTransport(transport, self.turn, self.loop))
        if len(self.connections) > MAX_CONNECTIONS:
            self._is_refused = True
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        self._unheard += len(data)
        super().data_received(data)
        if max(self._unheard, self._trailer_bytes) > MAX_HEADER_BYTES:
            self._refuse(f"headers of more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._trailer_bytes = True, 0
        super().on_message_begin()
        cast(Scope, self.scope)[ABORT] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
        else:  # a trailer, which nobody reads
            self._trailer_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._unheard, self._in_head = 0, False
        size = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        self._headers_came()
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse(
                f"{len(self.headers)} headers, {size} bytes; "
                f"at most {MAX_HEADERS} and {MAX_HEADER_BYTES} are accepted"
            )
            return
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["method"] != "HEAD":  # or is no HTTP
            cast(Scope, self.cycle.scope)[WRITE] = partial(_write, self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unheard = 0
        if not self._is_refused:
            super().on_message_complete()

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._too_late)

    def _headers_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._answer_and_close(b"408 Request Timeout", "the request headers did not come in time")

    def _refuse(self, why: str) -> None:
        self._answer_and_close(b"431 Request Header Fields Too Large", why)

    def _answer_and_close(self, status: bytes, text: str) -> None:
        self._headers_came()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # what would be said here would be part of another's answer
            return
        body = text.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\nconnection: close\r\n" % status
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()


def connections() -> type[Connection]:
    """The class of one server's connections, whose writes go out together."""

    class Together(Connection):
        turn = Turn()

    return Together


def _write(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """Write a piece of an answer that comes in chunks, if the client's buffer has room: what the
    cycle's own `send` does then, in a third of the time. False = nothing was written."""
    is_open = cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected)
    if not is_open or cycle.flow.write_paused or not piece:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True
