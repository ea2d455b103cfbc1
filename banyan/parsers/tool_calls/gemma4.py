"""Gemma 4's calls: a name and an object with bare keys, whose texts stand between <|"|> tokens.

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}<tool_call|>

A call is read when it is complete. Source: the chat template of Gemma 4.
"""

import json
import re

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.partial_json import MAX_DEPTH
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_name
from banyan.parsers.tool_calls.json_calls import text_with_calls

MAX_CHARS = 1 << 16
"""Longest arguments, which are read at once."""

_START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME_END, _ARGUMENTS_END = Delimiters("{"), Delimiters(_END)
_KEY = re.compile(r"\s*([^:{}\[\],]{1,256}):\s*")
_SCALAR = re.compile(r"[^,\]}]*")
_SPACE = re.compile(r"\s*")


class _Object:
    """Reads one object from the front of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> dict[str, object]:
        found = self._members(0)
        if self._text[self._at :].strip():
            raise Malformed
        return found

    def _members(self, depth: int) -> dict[str, object]:
        """The members after an opening brace, up to and with the closing one."""
        members: dict[str, object] = {}
        while not self._takes("}"):
            key = self._string() if self._sees(_QUOTE) else None
            if key is None:
                match = _KEY.match(self._text, self._at)
                if match is None:
                    raise Malformed
                key, self._at = match[1].strip(), match.end()
            elif not self._takes(":"):
                raise Malformed
            members.setdefault(key, self._value(depth + 1))
            if not self._takes(",") and not self._sees("}"):
                raise Malformed
        return members

    def _value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise Malformed
        if self._sees(_QUOTE):
            return self._string()
        if self._takes("{"):
            return self._members(depth)
        if self._takes("["):
            items: list[object] = []
            while not self._takes("]"):
                items.append(self._value(depth + 1))
                if not self._takes(",") and not self._sees("]"):
                    raise Malformed
            return items
        match = _SCALAR.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        text = match[0].strip()
        try:
            return json.loads(text, parse_constant=_no_constant)
        except ValueError:
            return text

    def _string(self) -> str:
        self._takes(_QUOTE)
        end = self._text.find(_QUOTE, self._at)
        if end < 0:
            raise Malformed
        text, self._at = self._text[self._at : end], end + len(_QUOTE)
        return text

    def _sees(self, literal: str) -> bool:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        return self._text.startswith(literal, match.end())

    def _takes(self, literal: str) -> bool:
        """Consume white space and `literal` if it comes next."""
        if not self._sees(literal):
            return False
        self._at = self._text.index(literal, self._at) + len(literal)
        return True


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    yield from source.expect("call:")
    name, _ = yield from read_name(source, _NAME_END)
    text, _ = yield from source.collect(_ARGUMENTS_END, MAX_CHARS)
    arguments = json.dumps(_Object(text).read(), ensure_ascii=False, allow_nan=False)
    try:
        arguments.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    out.begin_call(name)
    out.add_arguments(arguments)
    out.end_call()


GEMMA4 = ToolFormat(text_with_calls(_START, _call), (_START, _END, _QUOTE))
