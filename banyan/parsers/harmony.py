"""Harmony, the message format of gpt-oss: its reasoning parser and its tool-call parser.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The analysis channel is the reasoning. Calls are messages to functions.NAME, mostly in the
commentary channel; the reasoning parser passes them on unchanged.

Source: the Harmony response format guide of gpt-oss.
"""

import re
from dataclasses import dataclass

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText, Truncated
from banyan.parsers.reasoning import ReasoningFormat, ReasoningWriter
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_arguments, read_or_text

RECIPIENT = " to="
"""An answer may start inside a header, because its prompt ends with <|start|>assistant."""
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

MAX_HEADER_CHARS = 512
FUNCTIONS = "functions."

OPENERS = Delimiters(START, CHANNEL)
ENDERS = Delimiters(END, RETURN, CALL, START, CHANNEL)
_HEADER_END = Delimiters(MESSAGE)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class MessageHeader:
    """The header before a message's text; `raw` is all of it, with its delimiters."""

    channel: str
    recipient: str
    raw: str

    @property
    def tool(self) -> str:
        """The function that the message calls; "" = none."""
        if not self.recipient.startswith(FUNCTIONS):
            return ""
        return self.recipient.removeprefix(FUNCTIONS)


def read_header(source: StreamingText, opener: str) -> Reading[MessageHeader | None]:
    """Read the header after `opener`. None = no header follows.

    A header that the end of the text cuts off has no channel.
    """
    try:
        text, delimiter = yield from source.collect(_HEADER_END, MAX_HEADER_CHARS)
    except Truncated:
        return MessageHeader("", "", opener + source.take(MAX_HEADER_CHARS))
    except Malformed:
        return None
    raw = opener + text + delimiter
    channel, recipient = _CHANNEL.search(raw), _RECIPIENT.search(raw)
    return MessageHeader(channel[1] if channel else "", recipient[1] if recipient else "", raw)


def next_opener(ender: str) -> str:
    """`ender` if it also opens the next message, else ""."""
    return ender if ender in (START, CHANNEL) else ""


_OPENING = CHANNEL + "analysis" + MESSAGE


def _read_reasoning(
    source: StreamingText, out: ReasoningWriter, starts_inside: bool
) -> Reading[None]:
    opener = ""
    if starts_inside:
        opener = yield from _reasoning_body(source, out, "analysis", "")
    elif (yield from source.follows(RECIPIENT)):
        opener = RECIPIENT
    while opener or (opener := (yield from source.until(OPENERS, out.add_text))):
        header = yield from read_header(source, opener)
        if header is None:
            out.add_text(opener)
            opener = ""
            continue
        (out.add_text if header.tool else out.add_delimiter)(header.raw)
        opener = yield from _reasoning_body(source, out, header.channel, header.tool)


def _reasoning_body(
    source: StreamingText, out: ReasoningWriter, channel: str, tool: str
) -> Reading[str]:
    """Read one message's text and its end. Returns the next message's opener, if that ended it."""
    is_reasoning = channel == "analysis" and not tool
    ender = yield from source.until(ENDERS, out.add_reasoning if is_reasoning else out.add_text)
    following = next_opener(ender)
    if not following:
        (out.add_text if tool else out.add_delimiter)(ender)
    return following


REASONING_FORMAT = ReasoningFormat(
    _read_reasoning,
    _OPENING,
    END,
    markers=MARKERS,
    answer=CHANNEL + "final" + MESSAGE,
)


def _read_calls(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    opener = RECIPIENT if (yield from source.follows(RECIPIENT)) else ""
    while opener or (opener := (yield from source.until(OPENERS, out.add_text))):
        header = yield from read_header(source, opener)
        if header is None:
            out.add_text(opener)
            opener = ""
            continue
        if header.tool:
            yield from read_or_text(source, out, header.raw, _call(source, out, header.tool))
        opener = next_opener((yield from source.until(ENDERS, out.add_text)))


def _call(source: StreamingText, out: ToolCallWriter, name: str) -> Reading[None]:
    out.begin_call(name)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()


def _tag(name: str) -> tuple[str, str]:
    head = f"{START}assistant{CHANNEL}commentary to={FUNCTIONS}{name} "
    return f"{head}{CONSTRAIN}json{MESSAGE}", CALL


TOOL_FORMAT = ToolFormat(_read_calls, MARKERS, _tag, START)
