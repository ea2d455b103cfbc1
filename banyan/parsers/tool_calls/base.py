"""ToolParser: an answer's text to what was said and which tools were called, as it arrives.

A format is one generator function that reads the text front to back (`ToolFormat.read`). Streaming
and whole answers use the same parser: whole means one feed and a finish.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from banyan.parsers.incremental import Arriving, Cut, Malformed, Marks, Reading
from banyan.parsers.partial_json import JsonCopy
from banyan.parsers.parts import CallArguments, CallStart, Part, Said, joined
from banyan.parsers.tool_calls.definitions import Tools

MAX_NAME_CHARS = 256
_UNPAIRED = re.compile("[\ud800-\udfff]")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class Outcome:
    """Where a format puts what it reads.

    White space around calls belongs to the format and is left out. A call that the model wrote
    wrongly is closed, so that its arguments are JSON in any case.
    """

    def __init__(self, tools: Tools, max_calls: int) -> None:
        self.tools = tools
        self.closers: list[str] = []
        """What would complete the arguments put so far, inside out."""
        self.in_call = False
        self.num_calls = 0
        self._max_calls = max_calls
        self._parts: list[Part] = []
        self._space = ""
        self._is_empty = True
        self._after_call = False

    def say(self, text: str) -> None:
        """Text for the user; white space at its end waits for what comes behind it."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._after_call = False
            self._parts.append(Said(kept))

    def begin(self, name: str, id: str = "") -> None:
        """A call starts. Malformed when that is no name of a function."""
        if not name or len(name) > MAX_NAME_CHARS or _UNPRINTABLE.search(name + id):
            raise Malformed
        self.in_call, self._is_empty = True, True
        self._space, self._after_call = "", True
        if self._is_wanted:
            self._parts.append(CallStart(self.num_calls, name, id))

    def put(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        self._is_empty = False
        if self._is_wanted and text:
            self._parts.append(CallArguments(self.num_calls, text))

    def end(self) -> None:
        """The call is over; what its arguments lack is completed."""
        if self._is_empty:
            self.put("{}")
        elif self.closers:
            self.put("".join(reversed(self.closers)))
        self.closers.clear()
        self.in_call = False
        self.num_calls += 1

    def flush(self) -> None:
        """Nothing follows: white space that waited is text, unless it followed a call."""
        if self._space and not self._after_call:
            self._parts.append(Said(self._space))
        self._space = ""

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    @property
    def _is_wanted(self) -> bool:
        return self.num_calls < self._max_calls


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        read: reads a whole answer, and returns at its end.
        markers: texts that must survive detokenisation, though a vocabulary may call them special.
        tag: name of a function -> what stands before and behind its arguments, where these are
            JSON, so that a grammar can force a call; None = calls are forced as a bare JSON list.
        trigger: with what every tag begins.
        id_chars: length of the alphanumeric call ids that the family's chat templates insist on;
            0 = any id will do.
    """

    read: Callable[[Arriving, Outcome], Reading[None]]
    markers: tuple[str, ...] = ()
    tag: Callable[[str], tuple[str, str]] | None = None
    trigger: str = ""
    id_chars: int = 0


class ToolParser:
    """One answer's parser.

    Args:
        tools: what the request offers.
        max_calls: calls that are passed on; further ones are read and left out.
    """

    def __init__(self, format: ToolFormat, tools: Tools, max_calls: int = 1 << 30) -> None:
        self._source = Arriving()
        self._outcome = Outcome(tools, max_calls)
        self._reading = format.read(self._source, self._outcome)
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._outcome.num_calls + self._outcome.in_call

    def feed(self, text: str) -> list[Part]:
        """What the new text makes certain."""
        self._source.add(text)
        self._advance()
        return self._outcome.take()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """The rest, when nothing follows.

        Args:
            is_cut: the model was stopped before it was done; an open call then stays as it is.
        """
        self._source.end(is_cut)
        self._advance()
        self._outcome.flush()
        return self._outcome.take()

    def _advance(self) -> None:
        if self._is_done:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._is_done = True


def attempt(source: Arriving, out: Outcome, opener: str, reading: Reading[None]) -> Reading[bool]:
    """Run the reading of one block behind `opener`; when it is malformed, what it is not able to
    make a call of is text. Returns whether it was well formed."""
    source.capture(opener)
    num_calls = out.num_calls
    try:
        yield from reading
    except Malformed as problem:
        raw = source.release()
        if out.in_call:
            if isinstance(problem, Cut) and source.is_cut:
                yield from source.rest(_drop)
                return False
            out.end()
        elif out.num_calls == num_calls:
            out.say(raw)
        return False
    source.release()
    return True


def call_json(source: Arriving, out: Outcome, only_known: bool = False) -> Reading[None]:
    """One call as a JSON object with "name" and "arguments" or "parameters".

    Args:
        only_known: nothing marks the object as a call, so it must name one of the tools and have
            no other fields.
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
    """The fields around the arguments of one call."""

    def __init__(self, source: Arriving, out: Outcome, only_known: bool) -> None:
        self._source = source
        self._out = out
        self._only_known = only_known
        self._id = ""
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._has_arguments = False

    def field(self) -> Reading[None]:
        key = yield from read_string(self._source)
        yield from self._source.spaces()
        yield from self._source.expect(":")
        yield from self._source.spaces()
        if key == "name" and not self._out.in_call:
            yield from self._name()
        elif key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            yield from self._read_arguments()
        elif self._only_known and key not in ("id", "type"):
            raise Malformed
        elif key == "id" and (yield from self._source.need()) == '"' and not self._out.in_call:
            self._id = yield from read_string(self._source)
        else:
            yield from JsonCopy(self._source, _drop).value()

    def close(self) -> None:
        if not self._out.in_call:
            raise Malformed
        self._out.end()

    def _name(self) -> Reading[None]:
        name = yield from read_string(self._source)
        if self._only_known and name not in self._out.tools:
            raise Malformed
        self._out.begin(name, self._id[:MAX_NAME_CHARS])
        if self._arguments is not None:
            self._out.put(self._arguments)

    def _read_arguments(self) -> Reading[None]:
        if self._out.in_call:
            yield from arguments_json(self._source, self._out)
            return
        held: list[str] = []
        yield from _object_json(self._source, held.append, [])
        self._arguments = "".join(held)


def arguments_json(source: Arriving, out: Outcome) -> Reading[None]:
    """The arguments of the call that has begun: a JSON object, null, or a string that holds one."""
    yield from _object_json(source, out.put, out.closers)


def _object_json(source: Arriving, put: Callable[[str], None], closers: list[str]) -> Reading[None]:
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
    """`text` if it is a JSON object and nothing else."""
    source, parts = Arriving(), []
    source.add(text)
    source.end()
    try:
        for _ in _object_json(source, parts.append, []):
            pass
        for _ in source.spaces():
            pass
        rest = source.take(1)
    except Cut:
        rest = "…"
    if rest or _UNPAIRED.search(text):
        raise Malformed
    return "".join(parts)


def read_string(source: Arriving) -> Reading[str]:
    """A JSON string, consumed whole and decoded."""
    if (yield from source.need()) != '"':
        raise Malformed
    parts: list[str] = []
    yield from JsonCopy(source, parts.append).value()
    return json.loads("".join(parts))


def _drop(_: str) -> None:
    """Takes text that nobody wants."""


def named(source: Arriving, marks: Marks) -> Reading[tuple[str, str]]:
    """(name, mark) of a function up to the first of `marks`."""
    text, mark = yield from source.collect(marks, MAX_NAME_CHARS)
    return text.strip(), mark
