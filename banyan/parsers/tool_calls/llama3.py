"""Llama 3.1 to 3.3: JSON after <|python_tag|>, or as the whole answer.

    <|python_tag|>{"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}

Source: the prompt-format pages of Llama 3.1 and 3.2 (JSON-based tool calling).
"""

import json

from banyan.parsers.incremental import Delimiters, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_call, read_or_text

_TAG = "<|python_tag|>"
_DELIMITERS = Delimiters(_TAG)


def _read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    out.add_text((yield from source.spaces()))
    if (yield from source.peek()) == "{":
        yield from _calls(source, out, "", only_known=True)
    while opener := (yield from source.until(_DELIMITERS, out.add_text)):
        yield from _calls(source, out, opener, only_known=False)


def _calls(
    source: StreamingText, out: ToolCallWriter, opener: str, only_known: bool
) -> Reading[None]:
    """Calls separated by semicolons."""
    while (yield from read_or_text(source, out, opener, read_call(source, out, only_known))):
        opener, only_known = (yield from source.spaces()), True
        if (yield from source.follows(";")):
            opener += ";" + (yield from source.spaces())
        if (yield from source.peek()) != "{":
            out.add_text(opener)
            return


def _tag(name: str) -> tuple[str, str]:
    return f'{_TAG}{{"name": {json.dumps(name)}, "parameters": ', "}"


FORMAT = ToolFormat(_read, (_TAG,), _tag, _TAG)
