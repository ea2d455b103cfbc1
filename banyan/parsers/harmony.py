"""The message format of gpt-oss: channels, recipients, and where each message begins and ends.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Source: the Harmony response format guide of gpt-oss.
"""

import re
from dataclasses import dataclass

from banyan.parsers.incremental import Arriving, Cut, Malformed, Marks, Reading

RECIPIENT = " to="
"""An answer may begin inside of a header, because its prompt ends with <|start|>assistant."""
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

MAX_HEADER_CHARS = 512
FUNCTIONS = "functions."

OPENERS = Marks(START, CHANNEL)
ENDERS = Marks(END, RETURN, CALL, START, CHANNEL)
_BEHIND_HEADER = Marks(MESSAGE)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class Header:
    """What stands before a message's text."""

    channel: str
    recipient: str
    raw: str

    @property
    def tool(self) -> str:
        """The function that the message calls; "" when it calls none."""
        if not self.recipient.startswith(FUNCTIONS):
            return ""
        return self.recipient.removeprefix(FUNCTIONS)


def header(source: Arriving, opener: str) -> Reading[Header | None]:
    """The header behind `opener`; None when there is none. A header that the end of the text cuts
    off is one of no channel."""
    try:
        text, mark = yield from source.collect(_BEHIND_HEADER, MAX_HEADER_CHARS)
    except Cut:
        return Header("", "", opener + source.take(MAX_HEADER_CHARS))
    except Malformed:
        return None
    raw = opener + text + mark
    channel, recipient = _CHANNEL.search(raw), _RECIPIENT.search(raw)
    return Header(channel[1] if channel else "", recipient[1] if recipient else "", raw)


def after(mark: str) -> str:
    """The opener of the next message, where one message's end is the next one's beginning."""
    return mark if mark in (START, CHANNEL) else ""
