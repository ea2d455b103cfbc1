"""Llama 3.1 to 3.3: JSON behind <|python_tag|>, or as the whole answer.

    <|python_tag|>{"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}

Source: the prompt-format pages of Llama 3.1 and 3.2 (JSON-based tool calling).
"""

import json

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, attempt, call_json

_TAG = "<|python_tag|>"
_MARKS = Marks(_TAG)


def _read(source: Arriving, out: Outcome) -> Reading[None]:
    out.say((yield from source.spaces()))
    if (yield from source.peek()) == "{":
        yield from _calls(source, out, "", only_known=True)
    while mark := (yield from source.until(_MARKS, out.say)):
        yield from _calls(source, out, mark, only_known=False)


def _calls(source: Arriving, out: Outcome, opener: str, only_known: bool) -> Reading[None]:
    """Calls divided by semicolons."""
    while (yield from attempt(source, out, opener, call_json(source, out, only_known))):
        opener, only_known = (yield from source.spaces()), True
        if (yield from source.follows(";")):
            opener += ";" + (yield from source.spaces())
        if (yield from source.peek()) != "{":
            out.say(opener)
            return


def _tag(name: str) -> tuple[str, str]:
    return f'{_TAG}{{"name": {json.dumps(name)}, "parameters": ', "}"


FORMAT = ToolFormat(_read, (_TAG,), _tag, _TAG)
