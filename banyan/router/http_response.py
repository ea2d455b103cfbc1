"""Write a request and parse its response in HTTP/1.1 with h11, without a socket.

The limits on what a worker may send are here.
"""

from dataclasses import dataclass

import h11

from banyan.base.errors import BanyanError
from banyan.base.log import printable

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


class BadResponse(BanyanError):
    """A worker sent an invalid HTTP response, or more than is accepted."""


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
