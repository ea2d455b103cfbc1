"""Limits of requests: size and time of bodies, deadlines, and strict JSON."""

import asyncio
import codecs
import json
import json.scanner
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
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
MAX_CONTAINERS = 131_072
MAX_TEXTS = 100_000
MAX_ESCAPES = 4_000_000
"""Values of one JSON body; among them lists and objects, and strings and keys; and escapes in
strings."""
MAX_KEYS = 16_384
"""Keys of one object in a body of more than QUICK_VALUES."""
MAX_DIGITS = 4300
"""Characters of one number in such a body; Python reads no longer integers."""
BLANK_BYTES = 1 << 20
"""White space in one run is at most twice as long."""
QUICK_VALUES = 8192
QUICK_BYTES = 4 << 20
"""Larger bodies are parsed in steps; this size takes a parser in C a few milliseconds."""
LONG_TEXT = 1 << 16
"""Bytes of a text in such a body; longer ones are taken out before it is parsed."""


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
    return value


def strict_json(body: bytes) -> object:
    """Parse JSON; refuse what parsers interpret differently and what takes much time or memory.

    Duplicate keys, bad UTF-8, lone surrogates, NaN and infinity are refused; integers of any size
    are exact. A parser in C keeps the interpreter to itself until it returns, so bodies of many
    values are parsed in steps (`_SteppedParser`), and long texts, such as files in base64, are
    taken out before.
    """
    try:
        rest, texts = _without_long_texts(body) if len(body) > QUICK_BYTES else (body, LongTexts())
        _refuse_many(rest)
        if len(body) > QUICK_BYTES or rest.count(b",") > QUICK_VALUES:
            value = _SteppedParser(texts).decode(_decoded(rest))
        else:
            orjson.loads(rest)
            value = json.loads(rest, object_pairs_hook=unique_keys)
    except (orjson.JSONDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_json(f"the body is not valid JSON: {error}") from None
    except (RecursionError, ValueError) as error:
        raise bad_json(f"the body is not acceptable JSON: {error}") from None
    if count_of(rest, b"{", b"[") > MAX_DEPTH:
        check_depth(value, "the body")
    return value


class LongTexts:
    """Long texts of a body, represented by short ones while the rest is parsed."""

    def __init__(self) -> None:
        self._mark = f"{os.urandom(16).hex()}-"
        self._texts: list[str] = []

    def add(self, text: str) -> bytes:
        """JSON of the text that stands for `text`."""
        self._texts.append(text)
        return f'"{self._mark}{len(self._texts) - 1}"'.encode()

    def of(self, text: str) -> str:
        """The long text that `text` stands for; any other text itself."""
        is_marked = bool(self._texts) and text.startswith(self._mark)
        return self._texts[int(text.removeprefix(self._mark))] if is_marked else text


def _without_long_texts(body: bytes) -> tuple[bytes, LongTexts]:
    """The body without its long texts, as far as these have no escapes.

    Texts are looked for up to the QUICK_VALUES-th quote, or the first escaped one.

    Raises:
        ValueError: a long text has a control character, or is no UTF-8.
    """
    texts, kept = LongTexts(), list[bytes]()
    at = copied = 0
    for _ in range(QUICK_VALUES):
        begin = body.find(b'"', at) + 1
        end = body.find(b'"', begin) if begin else -1
        if end < 0 or body[end - 1 : end] == b"\\":
            break
        at = end + 1
        if end - begin > LONG_TEXT and body.find(b"\\", begin, end) < 0:
            with memoryview(body)[begin:end] as text:
                _refuse_controls(text)
                kept += (body[copied : begin - 1], texts.add(str(text, "utf-8")))
            copied = at
    return b"".join([*kept, body[copied:]]) if kept else body, texts


def _refuse_controls(text: memoryview) -> None:
    for begin in range(0, len(text), _PLAIN_CHARS):
        piece = bytes(text[begin : begin + _PLAIN_CHARS])
        if len(piece.translate(None, _CONTROLS)) < len(piece):
            raise ValueError("a text has a control character that is not escaped")


_decoder: Any = json.decoder
_scanner: Any = json.scanner
"""Their parts in Python have no types."""


class _SteppedParser(json.JSONDecoder):
    """json's decoder in Python, between whose steps other threads run.

    Runs of numbers, such as prompts of token ids, are left to the parser in C.

    Args:
        texts: texts that others stand for.
    """

    def __init__(self, texts: LongTexts) -> None:
        super().__init__(
            object_pairs_hook=self._object, parse_float=_finite, parse_constant=_refuse_constant
        )
        self.parse_object = self._members
        self.parse_array = self._array
        self.parse_string = self._string
        self._texts = texts
        self._scan = _scanner.py_make_scanner(self)
        self.scan_once = self._value

    def _value(self, text: str, end: int) -> tuple[object, int]:
        if _LONG_NUMBER.match(text, end):
            raise ValueError(f"a number has more than {MAX_DIGITS} characters")
        return self._scan(text, end)

    def _string(self, text: str, end: int, strict: bool = True) -> tuple[str, int]:
        found, end = _scan_string(text, end, strict)
        return self._texts.of(found), end

    def _members(
        self, text_and_end: tuple[str, int], strict: bool, _: object, *rest: object
    ) -> tuple[object, int]:
        return _decoder.JSONObject(text_and_end, strict, self._value, *rest)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(pairs) > MAX_KEYS:
            raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_KEYS} are accepted")
        for key, _ in pairs:
            _check_surrogates(key)
        return unique_keys([(self._texts.of(key), value) for key, value in pairs])

    def _array(self, text_and_end: tuple[str, int], _: object) -> tuple[list[object], int]:
        text, end = text_and_end
        found: list[object] = []
        while run := _NUMBERS.match(text, end):
            found += orjson.loads(f"[{run[0].rpartition(',')[0]}]")
            end = run.end()
        if found and text[end : end + 1] == "]":
            raise json.JSONDecodeError("Expecting value", text, end)
        rest, end = _decoder.JSONArray((text, end), self._value)
        return (found + rest if found else rest), end


_NUMBER = r"(?:0|-0(?=\.)|-?[1-9][0-9]{0,14})(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,3})?"
_NUMBERS = re.compile(rf"(?:[ \t\n\r]*+{_NUMBER}[ \t\n\r]*+,){{1,2048}}[ \t\n\r]*+")
"""Possessive: white space is never given back, so a run of it is read once."""
_LONG_NUMBER = re.compile(rf"[-+.0-9eE]{{{MAX_DIGITS + 1}}}")
_PLAIN_CHARS = 1 << 20
_CONTROLS = bytes(range(32))
_PLAIN = re.compile(rf'[^"\\\x00-\x1f]{{{_PLAIN_CHARS}}}')
_NEXT_TEXT = re.compile(rb',[ \t\n\r]*"')


def _scan_string(text: str, end: int, strict: bool = True) -> tuple[str, int]:
    begin = end
    while (run := _PLAIN.match(text, end)) and run.end() - end == _PLAIN_CHARS:
        end = run.end()
    rest, after = _decoder.scanstring(text, end, strict)
    is_plain = len(rest) == after - 1 - end  # an escape is longer than its character
    found = text[begin : after - 1] if is_plain else text[begin:end] + rest
    _check_surrogates(found)
    return found, after


def _check_surrogates(text: str) -> None:
    """UnicodeEncodeError, a ValueError, if a text has a lone surrogate."""
    if not text.isascii():
        text.encode()


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _refuse_many(body: bytes) -> None:
    """Count values and escapes before parsing, which cannot be interrupted; strings count too."""
    for marks, most, what in (
        ((b",",), MAX_VALUES, "values"),
        ((b"[", b"{"), MAX_CONTAINERS, "lists and objects"),
        ((b"\\",), MAX_ESCAPES, "escapes"),
    ):
        if count_of(body, *marks) > most:
            raise bad_json(f"the body has more than {most} {what}")
    if count_of(body, b",") > MAX_TEXTS:
        texts = sum(1 for _ in islice(_NEXT_TEXT.finditer(body), MAX_TEXTS + 1))
        if texts > MAX_TEXTS:
            raise bad_json(f"the body has more than {MAX_TEXTS} strings and keys")

    for begin in range(0, len(body) - BLANK_BYTES + 1, BLANK_BYTES):
        if not body[begin : begin + BLANK_BYTES].strip():
            raise bad_json(f"the body has more than {BLANK_BYTES} bytes of white space in a run")


def count_of(body: bytes, *marks: bytes) -> int:
    """How often single bytes occur, counted in pieces between which other threads run."""
    pieces = range(0, len(body), _PLAIN_CHARS)
    return sum(body.count(mark, at, at + _PLAIN_CHARS) for mark in marks for at in pieces)


def _decoded(body: bytes) -> str:
    """The text of UTF-8 bytes, decoded in pieces between which other threads run."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    pieces = range(0, len(body), _PLAIN_CHARS)
    return "".join([decode(body[begin : begin + _PLAIN_CHARS]) for begin in pieces]) + decode(
        b"", final=True
    )


def bad_json(text: str, hint: str = "") -> RequestError:
    return RequestError(text, code="invalid_json", hint=hint)
