"""Calls whose arguments are tags, one per parameter: Qwen3-Coder, GLM, MiniMax, Step-3 and others.

A value is text, and the tool's schema gives its JSON type. Strings are streamed; other values are
passed on when they are complete.

Qwen3-Coder writes tags that contain the names, and sometimes leaves out the outer tag:

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Seed-OSS does the same between <seed:tool_call> tags. MiniMax-M2 and dots name both in attributes:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

GLM 4.5 and later write the name, then pairs of key and value tags:

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Hunyuan V3 writes <tool_sep> after the name, and <tool_calls> around all calls. Step-3 writes XML in
the namespace steptml, between special tokens:

    <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
    <steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Sources: the chat templates of Qwen3-Coder, Seed-OSS, MiniMax-M2, GLM-4.5, GLM-4.6 and step3.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from banyan.parsers.incremental import (
    Delimiters,
    Malformed,
    Reading,
    Sink,
    StreamingText,
    Truncated,
    after_space,
    text_before,
)
from banyan.parsers.tool_calls.base import (
    MAX_NAME_CHARS,
    ToolCallWriter,
    ToolFormat,
    read_name,
    read_or_text,
)
from banyan.parsers.tool_calls.definitions import json_types
from banyan.parsers.tool_calls.json_calls import text_with_calls
from banyan.parsers.tool_calls.pythonic import python_json

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_MAX_SPACE = 256
"""Characters that are looked at for the tag after a closing tag."""


def _plain_key(text: str) -> tuple[str, str]:
    return text.strip(), ""


@dataclass(frozen=True)
class Markup:
    """The tags of one format.

    Attributes:
        key: text before a parameter's name.
        key_end: text after the name.
        value_start: text between `key_end` and the value, besides white space.
        value_end: text after the value.
        end: text at the end of the call.
        after: texts that may follow the end of the call.
        is_lines: the value has lines of its own; its first and last line break are not part of it.
        read_key: text between `key` and `key_end` -> (name, type). The type is the one that the
            model writes; "" = none, "any" = any JSON value.
    """

    key: str
    key_end: str
    value_end: str
    end: str
    after: tuple[str, ...]
    value_start: str = ""
    is_lines: bool = False
    read_key: Callable[[str], tuple[str, str]] = field(default=_plain_key)


def read_parameters(
    source: StreamingText, out: ToolCallWriter, tool: str, markup: Markup
) -> Reading[None]:
    """Read the open call's parameters, up to and with the end of the call."""
    key_end = Delimiters(markup.key_end)
    values = _Values(source, out, tool, markup)
    after = Delimiters(*markup.after)
    out.add_arguments("{")
    out.closers.append("}")
    yield from source.spaces()
    while not (yield from source.follows(markup.end)):
        if (yield from after_space(source, after, after.max_length))[1]:
            break  # the model left out the end of the call
        yield from source.expect(markup.key)
        text, _ = yield from source.collect(key_end, 2 * MAX_NAME_CHARS)
        name, kind = markup.read_key(text)
        if markup.value_start:
            yield from source.spaces()
            yield from source.expect(markup.value_start)
        types = frozenset((kind,)) if kind else out.tools.types_of(tool, name)
        yield from values.read(name, types)
        yield from source.spaces()
    out.add_arguments("}")
    out.closers.clear()


class _Values:
    """Writes the values of one arguments object.

    A value may contain any text. Its closing tag ends it only before the next parameter or the end
    of the call; elsewhere the tag is text. Models also leave tags out: the next parameter that the
    tool has, and the end of the call, end a value too.
    """

    def __init__(
        self, source: StreamingText, out: ToolCallWriter, tool: str, markup: Markup
    ) -> None:
        self._source = source
        self._out = out
        self._tool = tool
        self._markup = markup
        self._stops = Delimiters(markup.value_end, markup.key, markup.end)
        self._after_value = Delimiters(markup.key, markup.end, *markup.after)
        self._after_call = Delimiters(*markup.after)
        self._seen: dict[str, None] = {}
        self._is_line_start = False

    def read(self, name: str, types: frozenset[str]) -> Reading[None]:
        head = (", " if self._seen else "") + _dumps(name) + ": "
        is_repeated = name in self._seen
        self._seen[name] = None
        if is_repeated:
            yield from self._until_end(_drop)  # the first value of a parameter wins
        elif types == {"string"}:
            yield from self._text(head)
        else:
            parts: list[str] = []
            yield from self._until_end(parts.append)
            self._out.add_arguments(head + typed_json("".join(parts), types))

    def _text(self, head: str) -> Reading[None]:
        out = self._out
        out.add_arguments(head + '"')
        out.closers.append('"')
        yield from self._until_end(lambda text: out.add_arguments(_dumps(text)[1:-1]))
        out.add_arguments('"')
        out.closers.pop()

    def _until_end(self, sink: Sink) -> Reading[None]:
        source, end = self._source, self._markup.value_end
        self._is_line_start = False
        put = _Lines(sink).take if self._markup.is_lines else sink

        def take(text: str) -> None:
            self._is_line_start = text.endswith("\n")
            put(text)

        while True:
            stop = yield from source.until(self._stops, take, True, keeps_delimiter=True)
            if not stop:
                raise Truncated
            if (yield from self._is_end(stop)):
                if stop == end:
                    source.take(len(end))
                return
            take(source.take(len(stop)))

    def _is_end(self, stop: str) -> Reading[bool]:
        """Whether the tag that comes next ends the value."""
        source, markup = self._source, self._markup
        size = len(stop)
        if stop == markup.value_end:
            at, found = yield from after_space(source, self._after_value, _MAX_SPACE, size)
            if found != markup.key:
                return bool(found) or (yield from self._is_last(at))
            try:
                name = yield from self._name_at(at + len(found))
            except Truncated:
                return True
            return name is not None and (self._is_missing(name) or at > size or not self._is_lines)
        if stop == markup.end:
            at, found = yield from after_space(source, self._after_call, _MAX_SPACE, size)
            return bool(found) or (yield from self._is_last(at))
        if self._is_lines and not self._is_line_start:
            return False
        name = yield from self._name_at(size)
        return name is not None and self._is_missing(name)

    @property
    def _is_lines(self) -> bool:
        return self._markup.is_lines

    def _is_last(self, at: int) -> Reading[bool]:
        """Whether the text ends at this position."""
        return len((yield from self._source.peek(at + 1))) <= at

    def _name_at(self, offset: int) -> Reading[str | None]:
        """The parameter whose tag, after `key`, begins here; None if no whole tag does."""
        source, markup = self._source, self._markup
        text = yield from text_before(source, markup.key_end, 2 * MAX_NAME_CHARS, offset)
        if text is None:
            return None
        if markup.value_start:
            start = Delimiters(markup.value_start)
            offset += len(text) + len(markup.key_end)
            at, found = yield from after_space(source, start, _MAX_SPACE, offset)
            if not found and (yield from self._is_last(at)):
                raise Truncated
            if not found:
                return None
        return markup.read_key(text)[0]

    def _is_missing(self, name: str) -> bool:
        """Whether the tool has such a parameter, and the call has no value for it yet."""
        return name not in self._seen and self._out.tools.has_parameter(self._tool, name)


class _Lines:
    """Sink that drops one line break at the start of the text and one at its end."""

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
    """The JSON value of a parameter's text.

    Args:
        types: JSON types that the schema allows; empty or with "any" = unspecified.
    """
    stripped = text.strip()
    stripped = _CONSTANTS.get(stripped, stripped)
    may_be_text = "string" in types
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        wanted = types & {"array", "object"}
        found = python_json(stripped) if wanted and stripped[:1] in ("[", "{", "(") else None
        if found is not None and json_types(json.loads(found)) & wanted:
            return found
        return _dumps(text)
    if may_be_text and (isinstance(value, str) or not json_types(value) & types):
        return _dumps(text)
    return stripped


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _drop(_: str) -> None:
    """Sink for text that is ignored."""


def function_tags(outer: str, outer_end: str) -> ToolFormat:
    """<function=f><parameter=city>…</parameter></function> between two tags, which models leave out
    now and then."""
    inner = "<function="
    delimiters, name_end = Delimiters(outer, inner), Delimiters(">")
    after = (outer_end, outer, inner)
    markup = Markup("<parameter=", ">", "</parameter>", "</function>", after, is_lines=True)

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        while opener := (yield from source.until(delimiters, out.add_text)):
            yield from read_or_text(source, out, opener, call(source, out, opener))

    def call(source: StreamingText, out: ToolCallWriter, opener: str) -> Reading[None]:
        if opener == outer:
            yield from source.spaces()
            yield from source.expect(inner)
        name, _ = yield from read_name(source, name_end)
        out.begin_call(name)
        yield from read_parameters(source, out, name, markup)
        out.end_call()
        yield from source.spaces()
        yield from source.follows(outer_end)

    return ToolFormat(read, (outer, outer_end))


QWEN3_CODER = function_tags("<tool_call>", "</tool_call>")
SEED_OSS = function_tags("<seed:tool_call>", "</seed:tool_call>")


def invoke_tags(outer: str, outer_end: str) -> ToolFormat:
    """<invoke name="f"><parameter name="city">…</parameter></invoke> between two tags."""
    opener, name_end = '<invoke name="', Delimiters('">')
    markup = Markup(
        '<parameter name="', '">', "</parameter>", "</invoke>", (outer_end, opener, outer)
    )

    def call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        name, _ = yield from read_name(source, name_end)
        out.begin_call(name)
        yield from read_parameters(source, out, name, markup)
        out.end_call()

    return ToolFormat(text_with_calls(opener, call, outer, outer_end), (outer, outer_end))


MINIMAX_M2 = invoke_tags("<minimax:tool_call>", "</minimax:tool_call>")
DOTS = invoke_tags("<dots_function_call>", "</dots_function_call>")

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def key_value_tags(call: str, call_end: str, separator: str = "", *around: str) -> ToolFormat:
    """The name, then pairs of key and value tags.

    Args:
        separator: text after the name; "" = none.
        around: texts around all calls.
    """
    name_end = Delimiters("\n", _KEY, call_end, *([separator] if separator else []))
    markup = Markup(_KEY, _KEY_END, _VALUE_END, call_end, (call, *around), value_start=_VALUE)

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        yield from source.spaces()
        text, found = yield from source.collect(name_end, MAX_NAME_CHARS, keeps_delimiter=True)
        name = text.strip()
        out.begin_call(name)
        if separator and found == separator:
            yield from source.expect(separator)
        yield from read_parameters(source, out, name, markup)
        out.end_call()

    markers = (call, call_end, _KEY, _KEY_END, _VALUE, _VALUE_END, *around)
    markers += (separator,) if separator else ()
    return ToolFormat(text_with_calls(call, read, *around), markers)


GLM45 = key_value_tags("<tool_call>", "</tool_call>")
HUNYUAN = key_value_tags(
    "<tool_call>", "</tool_call>", "<tool_sep>", "<tool_calls>", "</tool_calls>"
)
IQUEST = key_value_tags("<iquest_tool_call>", "</iquest_tool_call>")


_STEP_CALLS, _STEP_CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_STEP_CALL, _STEP_CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_STEP_SEPARATOR = "<｜tool_sep｜>"
_STEP_KIND_END = Delimiters(_STEP_SEPARATOR)
_STEP_NAME_END = Delimiters('">')
_STEP_MARKUP = Markup(
    '<steptml:parameter name="',
    '">',
    "</steptml:parameter>",
    "</steptml:invoke>",
    (_STEP_CALL_END, _STEP_CALL, _STEP_CALLS_END),
)


def _step_call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    kind, _ = yield from read_name(source, _STEP_KIND_END)
    if kind != "function":
        raise Malformed
    yield from source.spaces()
    yield from source.expect('<steptml:invoke name="')
    name, _ = yield from read_name(source, _STEP_NAME_END)
    out.begin_call(name)
    yield from read_parameters(source, out, name, _STEP_MARKUP)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_STEP_CALL_END)


STEP3 = ToolFormat(
    text_with_calls(_STEP_CALL, _step_call, _STEP_CALLS, _STEP_CALLS_END),
    (_STEP_CALLS, _STEP_CALLS_END, _STEP_CALL, _STEP_CALL_END, _STEP_SEPARATOR),
)
