"""ToolParser: divides an answer's text into text and tool calls, incrementally.

A format is one generator function that reads the text front to back (`ToolFormat.read`). A whole
answer uses the same parser as a stream: one `feed` and `finish`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from banyan.parsers.answer_deltas import (
    AnswerDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText, Truncated
from banyan.parsers.partial_json import JsonCopy
from banyan.parsers.tool_calls.definitions import Tools

MAX_NAME_CHARS = 256
_UNPAIRED = re.compile("[\ud800-\udfff]")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


CallTag = Callable[[str], tuple[str, str]]
"""Name of a function -> the texts before and after the arguments of its call."""


class ToolCallWriter:
    """Collects the text and the calls that a format reads.

    White space around calls belongs to the format and is dropped. A malformed call is completed, so
    its arguments are always JSON.
    """

    def __init__(self, tools: Tools, max_calls: int) -> None:
        self.tools = tools
        self.closers: list[str] = []
        """Brackets and quotes that would complete the arguments; the last one closes first."""
        self.in_call = False
        self.num_calls = 0
        self._max_calls = max_calls
        self._deltas: list[AnswerDelta] = []
        self._space = ""
        self._is_empty = True
        self._after_call = False

    def add_text(self, text: str) -> None:
        """Add text for the user. White space at its end is held until more text follows."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._after_call = False
            self._deltas.append(TextDelta(kept))

    def begin_call(self, name: str, id: str = "") -> None:
        """Start a call. Raises Malformed if `name` is no valid name of a function."""
        if not name or len(name) > MAX_NAME_CHARS or _UNPRINTABLE.search(name + id):
            raise Malformed
        self.in_call, self._is_empty = True, True
        self._space, self._after_call = "", True
        if self._is_wanted:
            self._deltas.append(ToolCallStart(self.num_calls, name, id))

    def add_arguments(self, text: str) -> None:
        """Add to the JSON text of the open call's arguments."""
        self._is_empty = False
        if self._is_wanted and text:
            self._deltas.append(ToolCallArguments(self.num_calls, text))

    def end_call(self) -> None:
        """End the open call, and complete its arguments."""
        if self._is_empty:
            self.add_arguments("{}")
        elif self.closers:
            self.add_arguments("".join(reversed(self.closers)))
        self.closers.clear()
        self.in_call = False
        self.num_calls += 1

    def flush(self) -> None:
        """End of the answer: held white space becomes text, unless it follows a call."""
        if self._space and not self._after_call:
            self._deltas.append(TextDelta(self._space))
        self._space = ""

    def take(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    @property
    def _is_wanted(self) -> bool:
        return self.num_calls < self._max_calls


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes tool calls.

    Attributes:
        read: reads a whole answer, and returns at its end.
        markers: texts that detokenisation must keep, even if they are special tokens.
        tag: lets a grammar force a call with JSON arguments; None = calls are forced as a bare JSON
            list (`json_calls.BARE_LIST`).
        trigger: the text that every tag starts with.
        id_chars: length of the alphanumeric call ids that the family's chat templates require; 0 =
            any id is valid.
    """

    read: Callable[[StreamingText, ToolCallWriter], Reading[None]]
    markers: tuple[str, ...] = ()
    tag: CallTag | None = None
    trigger: str = ""
    id_chars: int = 0


class ToolParser:
    """The tool-call parser of one answer.

    Args:
        tools: the tools that the request offers.
        max_calls: calls that are passed on; further ones are parsed and dropped.
    """

    def __init__(self, format: ToolFormat, tools: Tools, max_calls: int = 1 << 30) -> None:
        self._source = StreamingText()
        self._writer = ToolCallWriter(tools, max_calls)
        self._reading = format.read(self._source, self._writer)
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have started."""
        return self._writer.num_calls + self._writer.in_call

    def feed(self, text: str) -> list[AnswerDelta]:
        """The deltas that the new text decides."""
        self._source.add(text)
        self._advance()
        return self._writer.take()

    def finish(self, is_cut: bool = False) -> list[AnswerDelta]:
        """The remaining deltas, at the end of the answer.

        Args:
            is_cut: the model was stopped early; an open call then stays incomplete.
        """
        self._source.end(is_cut)
        self._advance()
        self._writer.flush()
        return self._writer.take()

    def _advance(self) -> None:
        if self._is_done:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._is_done = True


def read_or_text(
    source: StreamingText, out: ToolCallWriter, opener: str, reading: Reading[None]
) -> Reading[bool]:
    """Run the reading of one block after `opener`; a malformed block without a call becomes text.

    Returns whether the block was well formed.
    """
    source.capture(opener)
    num_calls = out.num_calls
    try:
        yield from reading
    except Malformed as problem:
        raw = source.release()
        if out.in_call:
            if isinstance(problem, Truncated) and source.is_cut:
                yield from source.rest(_drop)
                return False
            out.end_call()
        elif out.num_calls == num_calls:
            out.add_text(raw)
        return False
    source.release()
    return True


def read_call(
    source: StreamingText, out: ToolCallWriter, only_known: bool = False
) -> Reading[None]:
    """One call as a JSON object with "name" or "tool_name", and "arguments" or "parameters".

    Args:
        only_known: the object has no tag, so it must name one of the tools and have no other
            fields.
    """
    yield from source.spaces()
    yield from source.expect("{")
    envelope = _Envelope(source, out, only_known)
    yield from source.spaces()
    while not (yield from source.follows("}")):
        yield from envelope.field()
        yield from source.spaces()
        if not (yield from source.follows(",")):
            yield from source.expect("}")
            break
        yield from source.spaces()
    envelope.close()


class _Envelope:
    """Reads the fields of one call object."""

    def __init__(self, source: StreamingText, out: ToolCallWriter, only_known: bool) -> None:
        self._source = source
        self._out = out
        self._only_known = only_known
        self._id = ""
        self._arguments: str | None = None
        """Arguments that came before the name, held until the name is known."""
        self._has_arguments = False

    def field(self) -> Reading[None]:
        key = yield from read_string(self._source)
        yield from self._source.spaces()
        yield from self._source.expect(":")
        yield from self._source.spaces()
        if key in ("name", "tool_name") and not self._out.in_call:
            yield from self._name()
        elif key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            yield from self._arguments_value()
        elif self._only_known and key not in ("id", "type"):
            raise Malformed
        elif key == "id" and (yield from self._source.need()) == '"' and not self._out.in_call:
            self._id = yield from read_string(self._source)
        else:
            yield from JsonCopy(self._source, _drop).value()

    def close(self) -> None:
        if not self._out.in_call:
            raise Malformed
        self._out.end_call()

    def _name(self) -> Reading[None]:
        name = yield from read_string(self._source)
        if self._only_known and name not in self._out.tools:
            raise Malformed
        self._out.begin_call(name, self._id[:MAX_NAME_CHARS])
        if self._arguments is not None:
            self._out.add_arguments(self._arguments)

    def _arguments_value(self) -> Reading[None]:
        if self._out.in_call:
            yield from read_arguments(self._source, self._out)
            return
        held: list[str] = []
        yield from _object_json(self._source, held.append, [])
        self._arguments = "".join(held)


def read_arguments(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    """The open call's arguments: a JSON object, null, or a string that contains either."""
    yield from _object_json(source, out.add_arguments, out.closers)


def _object_json(
    source: StreamingText, put: Callable[[str], None], closers: list[str]
) -> Reading[None]:
    yield from source.spaces()
    first = yield from source.need()
    if first == "{":
        yield from JsonCopy(source, put, closers).value()
    elif first == '"':
        put(_object_text((yield from read_string(source))))
    elif first in "nN":
        yield from source.expect("null" if first == "n" else "None")
        put("{}")
    else:
        raise Malformed


def _object_text(text: str) -> str:
    """`text` as JSON arguments; Malformed if it contains anything else."""
    source, parts = StreamingText(), []
    source.add(text)
    source.end()
    try:
        for _ in _object_json(source, parts.append, []):
            pass
        for _ in source.spaces():
            pass
        rest = source.take(1)
    except Truncated:
        rest = "…"
    if rest or _UNPAIRED.search(text):
        raise Malformed
    return "".join(parts)


def read_string(source: StreamingText) -> Reading[str]:
    """Consume and decode a JSON string."""
    if (yield from source.need()) != '"':
        raise Malformed
    parts: list[str] = []
    yield from JsonCopy(source, parts.append).value()
    return json.loads("".join(parts))


def _drop(_: str) -> None:
    """Sink for text that is ignored."""


def read_name(source: StreamingText, ends: Delimiters) -> Reading[tuple[str, str]]:
    """Consume the name of a function up to and with the first of `ends`; returns (name, end)."""
    text, end = yield from source.collect(ends, MAX_NAME_CHARS)
    return text.strip(), end
