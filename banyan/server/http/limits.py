"""What may come in: body size and time, and JSON that means one thing to every reader.

Knows bytes and JSON; knows no routes.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import unique_keys
from banyan.base.log import printable
from banyan.requests.constraint import MAX_DEPTH, check_depth

Receive = Callable[[], Awaitable[dict[str, Any]]]

JSON_MEDIA = "application/json"

BODY_TIMEOUT_S = 10.0
"""Longest wait for the next piece of a body; a slower client is told 408."""

BODY_TOTAL_S = 120.0
"""Longest time for a whole body, however steadily it drips."""

DEADLINE = "x-request-timeout"
"""Header: seconds from the request's first byte to the last of its answer."""
MAX_DEADLINE_S = 7 * 24 * 3600.0

MAX_VALUES = 1_000_000
MAX_CONTAINERS = 250_000
"""Values, and lists and objects, of one JSON body: parsing as many takes a tenth of a second."""


class BodyRoom:
    """Room for the bodies that are in memory at the same time, from their first byte until they
    have been understood.

    Args:
        most_bytes: of all of them.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = self._left = most_bytes

    def check(self, size: int) -> None:
        """RequestError 503 when there is no room for `size` more bytes."""
        if size > self._left:
            raise RequestError(
                f"the server holds {self._most - self._left} bytes of requests that it is reading, "
                f"and has room for {self._most}; this needs {size} more",
                status=503,
                code="overloaded",
                hint="Send it again in a few seconds",
            )

    def move(self, size: int) -> None:
        """`size` more bytes are in memory; fewer when it is negative."""
        self._left -= size


class Body:
    """A body as it comes in and is held."""

    def __init__(self, room: BodyRoom) -> None:
        self.size = 0
        """Bytes that came."""
        self._room = room
        self._held = 0

    def add(self, size: int) -> None:
        """RequestError 503 when there is no room for this part."""
        self._room.check(size)
        self._room.move(size)
        self.size += size
        self._held += size

    def expect(self, size: int) -> None:
        """RequestError 503 when there is no room for so much at the moment."""
        self._room.check(size)

    def let_go(self) -> None:
        """It is no longer in memory. Harmless when repeated."""
        self._room.move(-self._held)
        self._held = 0


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


async def read_body(
    receive: Receive,
    declared: bytes | None,
    max_bytes: int,
    body: Body,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """The whole body, counted in `body`.

    Raises:
        RequestError: 413 when too large (declared or counted), 503 when there is no room for it
            beside those of others, 408 when too slow.
    """
    if declared is not None and declared.isdigit():
        if int(declared[:20]) > max_bytes:
            raise _too_large(f"{declared[:20].decode()}", max_bytes)
        body.expect(int(declared))
    parts: list[bytes] = []
    deadline_s = time.monotonic() + BODY_TOTAL_S
    while True:
        try:
            async with asyncio.timeout(min(timeout_s, deadline_s - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise RequestError(
                f"the body did not come in time; {body.size} bytes did",
                status=408,
                code="body_timeout",
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if body.size + len(part) > max_bytes:
            raise _too_large(f"at least {body.size + len(part)}", max_bytes)
        body.add(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes; at most {max_bytes} are accepted",
        status=413,
        code="body_too_large",
    )


def deadline_of(headers: Mapping[bytes, bytes], began_s: float) -> float | None:
    """Monotonic time at which the client wants its request to have ended; None = no limit.

    Raises:
        RequestError: 400; the header is no such number.
    """
    given = headers.get(DEADLINE.encode())
    if given is None:
        return None
    try:
        allowed_s = float(given)
    except ValueError:
        allowed_s = 0.0
    if not 0 < allowed_s <= MAX_DEADLINE_S:
        raise RequestError(
            f"the header {DEADLINE} must be seconds in (0, {MAX_DEADLINE_S:g}], got "
            f"{printable(given.decode('latin-1'), 40)!r}",
            param=DEADLINE,
        )
    return began_s + allowed_s


def too_late() -> RequestError:
    return RequestError(
        f"the request was not done within the seconds of its header {DEADLINE}",
        status=504,
        code="deadline_exceeded",
        hint="Give it more time, or ask for less",
    )


def json_object(body: bytes, media: str = JSON_MEDIA) -> dict[str, object]:
    """The JSON object that `body` is; RequestError 400 otherwise.

    Args:
        media: what the client calls it; named where that may be the fault.
    """
    try:
        value = strict_json(body)
    except RequestError as error:
        if media == JSON_MEDIA:
            raise
        given = f"content-type {printable(media, 80)!r}" if media else "no content-type"
        hint = f"Send JSON, with -H 'Content-Type: {JSON_MEDIA}'; this came with {given}"
        raise bad_json(error.text, hint) from None
    if not isinstance(value, dict):
        raise bad_json(f"the body must be a JSON object, got {type(value).__name__}")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        check_depth(value, "the body")
    return value


def strict_json(body: bytes) -> object:
    """Parse JSON, refusing what readers disagree on, and what would take long or much memory.

    orjson refuses bad UTF-8, lone surrogates, NaN, infinite numbers and depth above 1024; the
    second pass finds duplicate keys and keeps integers of any size exact.
    """
    _refuse_many(body)
    try:
        orjson.loads(body)
        return json.loads(body, object_pairs_hook=unique_keys)
    except orjson.JSONDecodeError as error:
        raise bad_json(f"the body is not valid JSON: {error}") from None
    except (RecursionError, ValueError) as error:
        raise bad_json(f"the body is not acceptable JSON: {error}") from None


def _refuse_many(body: bytes) -> None:
    """Count before parsing, which nothing interrupts. Marks within texts count too."""
    for marks, most, what in (
        ((b",",), MAX_VALUES, "values"),
        ((b"[", b"{"), MAX_CONTAINERS, "lists and objects"),
    ):
        if sum(map(body.count, marks)) > most:
            raise bad_json(f"the body has more than {most} {what}")


def bad_json(text: str, hint: str = "") -> RequestError:
    return RequestError(text, code="invalid_json", hint=hint)
