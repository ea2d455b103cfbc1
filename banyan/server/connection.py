"""Connection: uvicorn's HTTP protocol with bounds on what a client may send before it is heard.

Headers must come whole within a time and a size. A request may cut its connection at once
(`ABORT` in the scope), which drops what a client that never reads has left in the buffer.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from banyan.server.exchange import ABORT

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 200


class Connection(HttpToolsProtocol):
    """One client connection."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        if self._deadline is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(f"headers of more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        self._headers_came()
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse(
                f"{len(self.headers)} headers, {size} bytes; "
                f"at most {MAX_HEADERS} and {MAX_HEADER_BYTES} are accepted"
            )
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def _await_headers(self) -> None:
        self._header_bytes = 0
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
        body = text.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\nconnection: close\r\n" % status
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()
