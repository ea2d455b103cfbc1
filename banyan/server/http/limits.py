"""Limits of requests: size and time of bodies, deadlines, and strict JSON."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.base.json_types import unique_keys
from banyan.base.log import printable
from banyan.requests.constraint import MAX_DEPTH, check_depth

Receive = Callable[[], Awaitable[dict[str, Any]]]

JSON_MEDIA = "application/json"

BODY_TIMEOUT_S = 10.0
"""Longest wait for the next piece of a body; slower clients get 408."""

BODY_TOTAL_S = 120.0
"""Longest time for a whole body."""

DEADLINE = "x-request-timeout"
"""Header: seconds from the request's first byte to the last of its answer."""
MAX_DEADLINE_S = 7 * 24 * 3600.0

MAX_VALUES = 1_000_000
MAX_CONTAINERS = 250_000
"""Values, and lists and objects, of one JSON body. Parsing that many takes 0.1 s."""


class ReceivedBody:
    """Counts the bytes of one body while it is in memory, from the first byte until it is parsed.

    Args:
        memory: the bytes of all bodies in memory, by caller.
    """

    def __init__(self, memory: FairShare, caller: bytes = b"") -> None:
        self.size = 0
        """Bytes received."""
        self.caller = caller
        self._memory = memory
        self._held = 0

    def add(self, size: int) -> None:
        """Count a received part; RequestError 503 if it exceeds the limit."""
        self.expect(size)
        self._memory.take(self.caller, size)
        self.size += size
        self._held += size

    def expect(self, size: int) -> None:
        """RequestError 503 if a body of this size would exceed the limit now."""
        memory = self._memory
        if not memory.fits(self.caller, size):
            raise RequestError(
                f"the server holds {memory.total} bytes of requests that it is reading, "
                f"{memory.held_by(self.caller)} of them of this caller, and has room for "
                f"{memory.most}; this needs {size} more",
                status=503,
                code="overloaded",
                hint="Send it again in a few seconds",
            )

    def release(self) -> None:
        """The body is no longer in memory. May be called again."""
        if self._held:
            self._memory.give_back(self.caller, self._held)
            self._held = 0


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(
    receive: Receive,
    declared: bytes | None,
    max_bytes: int,
    body: ReceivedBody,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """Read the whole body, and count it in `body`.

    Raises:
        RequestError: 413 if it is too large (declared or counted), 503 if all bodies together are,
            408 if it is too slow.
        ClientGone: the client closed the connection.
    """
    if declared is not None and declared.isdigit():
        digits = declared.lstrip(b"0")[:20]  # int() refuses numbers of more than 4,300 digits
        size = int(digits or b"0")
        if size > max_bytes:
            raise _too_large(digits.decode(), max_bytes)
        body.expect(size)
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
    """Parse `body` as a JSON object; RequestError 400 if it is none.

    Args:
        media: content type; the error names it if it may be the cause.
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
    """Parse JSON; refuse what parsers interpret differently and what takes much time or memory.

    orjson refuses bad UTF-8, lone surrogates, NaN, infinity and depth above 1024. The second pass
    finds duplicate keys and keeps integers of any size exact.
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
    """Count values before parsing, which cannot be interrupted; strings count too."""
    for marks, most, what in (
        ((b",",), MAX_VALUES, "values"),
        ((b"[", b"{"), MAX_CONTAINERS, "lists and objects"),
    ):
        if sum(map(body.count, marks)) > most:
            raise bad_json(f"the body has more than {most} {what}")


def bad_json(text: str, hint: str = "") -> RequestError:
    return RequestError(text, code="invalid_json", hint=hint)
