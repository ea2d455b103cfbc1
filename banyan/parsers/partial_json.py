"""Copies JSON incrementally, so that the copy can be completed at any point.

Commas, keys and colons are held back until the next value starts; numbers and constants until they
are whole. Common mistakes of models are corrected: raw control characters and unknown escapes in
strings, commas before a closing bracket, Python's constants. The output follows RFC 8259.
"""

import json
import re

from banyan.parsers.incremental import Malformed, Reading, Sink, StreamingText

MAX_DEPTH = 64
MAX_SCALAR_CHARS = 400

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{4}", re.ASCII)
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


def object_text(arguments: object) -> str:
    """The arguments of an earlier call as the JSON text of an object.

    An object's own text is returned unchanged. A text that was cut off is completed. Nothing
    becomes an empty object, and any other value the member `arguments` of one.
    """
    if not isinstance(arguments, str):
        value = arguments
    elif not arguments.strip():
        value = None
    else:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return _completed(arguments) or object_text({"arguments": arguments})
        if isinstance(value, dict):
            return arguments
        if isinstance(value, str):
            return object_text(value)
    if value is None:
        value = {}
    elif not isinstance(value, dict):
        value = {"arguments": value}
    return json.dumps(value, ensure_ascii=False)


def _completed(text: str) -> str | None:
    """The object whose text begins with `text`, as far as it goes; None if no object does."""
    source, parts, closers = StreamingText(), list[str](), list[str]()
    source.add(text.strip())
    try:
        for _ in JsonCopy(source, parts.append, closers).value():
            break
        else:
            source.end()
            if source.take(1):
                return None
    except Malformed:
        return None
    whole = "".join([*parts, *reversed(closers)])
    return whole if whole.startswith("{") else None


class JsonCopy:
    """Copies one value.

    Args:
        put: callback for each piece of the copy.
        closers: stack of the brackets and quotes that would complete the copy; the last one closes
            first.
    """

    def __init__(self, source: StreamingText, put: Sink, closers: list[str] | None = None) -> None:
        self._source = source
        self._put = put
        self._closers = [] if closers is None else closers
        self._pending = ""

    def value(self) -> Reading[None]:
        """Copy the next value; Malformed if there is none."""
        yield from self._spaces()
        match (yield from self._source.need()):
            case '"':
                yield from self._string()
            case "{":
                yield from self._object()
            case "[":
                yield from self._array()
            case _:
                yield from self._scalar()

    def _object(self) -> Reading[None]:
        self._open("{", "}")
        while not (yield from self._closed("}")):
            yield from self._key()
            yield from self.value()
            yield from self._separator("}")

    def _array(self) -> Reading[None]:
        self._open("[", "]")
        while not (yield from self._closed("]")):
            yield from self.value()
            yield from self._separator("]")

    def _open(self, bracket: str, closer: str) -> None:
        if len(self._closers) >= MAX_DEPTH:
            raise Malformed
        self._flush(self._source.take(len(bracket)))
        self._closers.append(closer)

    def _closed(self, closer: str) -> Reading[bool]:
        yield from self._spaces()
        if (yield from self._source.need()) != closer:
            return False
        if "," in self._pending:
            self._pending = ""
        self._flush(self._source.take(1))
        self._closers.pop()
        return True

    def _separator(self, closer: str) -> Reading[None]:
        yield from self._spaces()
        following = yield from self._source.need()
        if following == ",":
            self._pending += self._source.take(1)
        elif following != closer:
            raise Malformed

    def _key(self) -> Reading[None]:
        if (yield from self._source.need()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from JsonCopy(self._source, parts.append)._string()
        self._pending += "".join(parts)
        yield from self._spaces()
        yield from self._source.expect(":")
        self._pending += ":"

    def _string(self) -> Reading[None]:
        source = self._source
        self._flush(source.take(1))
        self._closers.append('"')
        while True:
            yield from source.run(_PLAIN, self._put)
            match (yield from source.need()):
                case '"':
                    self._put(source.take(1))
                    self._closers.pop()
                    return
                case "\\":
                    yield from self._escape()
                case control:
                    source.take(1)
                    self._put(json.dumps(control)[1:-1])

    def _escape(self) -> Reading[None]:
        source = self._source
        kind = (yield from source.need(2))[1]
        if kind == "u" and _HEX.fullmatch((yield from source.need(6))[2:]):
            self._put(source.take(6))
        elif kind in '"\\/bfnrt':
            self._put(source.take(2))
        else:
            source.take(1)
            self._put("\\\\")

    def _scalar(self) -> Reading[None]:
        parts: list[str] = []
        yield from self._source.run(_WORD, parts.append)
        yield from self._source.need()  # a word at the very end of the text may be incomplete
        word = "".join(parts)
        if len(word) > MAX_SCALAR_CHARS:
            raise Malformed
        if word in _CONSTANTS:
            word = _CONSTANTS[word]
        elif not _NUMBER.fullmatch(word):
            raise Malformed
        self._flush(word)

    def _spaces(self) -> Reading[None]:
        parts: list[str] = []
        yield from self._source.run(_SPACE, parts.append)
        self._pending += "".join(parts)

    def _flush(self, text: str) -> None:
        self._put(self._pending + text)
        self._pending = ""
