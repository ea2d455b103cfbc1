"""Arguments written as tags, one for each parameter: the base of formats that are not JSON.

A value is text; the tool's schema says what it stands for. Texts are passed on while they arrive,
other values once they are whole.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from banyan.parsers.incremental import Arriving, Cut, Marks, Reading, Sink
from banyan.parsers.tool_calls.base import MAX_NAME_CHARS, Outcome

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _plain_key(text: str) -> tuple[str, str]:
    return text.strip(), ""


@dataclass(frozen=True)
class Markup:
    """The tags of one format.

    Attributes:
        key: what stands before a parameter's name.
        behind_key: what ends the name.
        before_value: what stands between the two, besides white space.
        behind_value: what ends the value.
        end: what ends the call.
        is_lines: a value stands on lines of its own, whose line breaks are not part of it.
        read_key: (text between `key` and `behind_key`) -> name, and the type where the model says
            it itself ("" = it does not, "any" = some JSON value).
    """

    key: str
    behind_key: str
    behind_value: str
    end: str
    before_value: str = ""
    is_lines: bool = False
    read_key: Callable[[str], tuple[str, str]] = field(default=_plain_key)


def members(source: Arriving, out: Outcome, tool: str, markup: Markup) -> Reading[None]:
    """The parameters of the call that has begun, up to and with the end of the call."""
    behind_key = Marks(markup.behind_key)
    values = _Values(source, out, markup)
    out.put("{")
    out.closers.append("}")
    yield from source.spaces()
    while not (yield from source.follows(markup.end)):
        yield from source.expect(markup.key)
        text, _ = yield from source.collect(behind_key, 2 * MAX_NAME_CHARS)
        name, kind = markup.read_key(text)
        if markup.before_value:
            yield from source.spaces()
            yield from source.expect(markup.before_value)
        types = frozenset((kind,)) if kind else out.tools.types_of(tool, name)
        yield from values.read(name, types)
        yield from source.spaces()
    out.put("}")
    out.closers.clear()


class _Values:
    """Writes the members of one arguments object."""

    def __init__(self, source: Arriving, out: Outcome, markup: Markup) -> None:
        self._source = source
        self._out = out
        self._is_lines = markup.is_lines
        self._end = Marks(markup.behind_value)
        self._seen: dict[str, None] = {}

    def read(self, name: str, types: frozenset[str]) -> Reading[None]:
        head = (", " if self._seen else "") + _dumps(name) + ": "
        if name in self._seen:
            yield from self._until_end(_nowhere)  # the first value of a parameter stands
        elif types == {"string"}:
            yield from self._text(head)
        else:
            parts: list[str] = []
            yield from self._until_end(parts.append)
            self._out.put(head + typed_json("".join(parts), types))
        self._seen[name] = None

    def _text(self, head: str) -> Reading[None]:
        out = self._out
        out.put(head + '"')
        out.closers.append('"')
        yield from self._until_end(lambda text: out.put(_dumps(text)[1:-1]))
        out.put('"')
        out.closers.pop()

    def _until_end(self, sink: Sink) -> Reading[None]:
        sink = _Lines(sink).take if self._is_lines else sink
        if not (yield from self._source.until(self._end, sink, leaves_part=True)):
            raise Cut


class _Lines:
    """Passes on text without a line break at its start and one at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_start = True
        self._held = ""

    def take(self, text: str) -> None:
        if self._is_start:
            self._is_start = False
            text = text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._sink(kept)


def typed_json(text: str, types: frozenset[str]) -> str:
    """The JSON that a parameter's text stands for.

    Args:
        types: JSON types that the schema allows; empty or with "any" = it does not say.
    """
    stripped = text.strip()
    stripped = _CONSTANTS.get(stripped, stripped)
    may_be_text = "string" in types
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _dumps(text)
    if may_be_text and (isinstance(value, str) or not _kinds(value) & types):
        return _dumps(text)
    return stripped


def _kinds(value: object) -> frozenset[str]:
    """The JSON types of a value; an integer is also a number."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number", "integer") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
    return frozenset(("object",))


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _nowhere(_: str) -> None:
    """Takes text that nobody wants."""
