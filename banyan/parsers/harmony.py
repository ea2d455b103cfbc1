"""The message format of gpt-oss (Harmony): channels, recipients, start and end of messages.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Source: the Harmony response format guide of gpt-oss.
"""

import re
from dataclasses import dataclass

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText, Truncated

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
