"""Kimi K2: a call id that holds the name, then plain JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}
    <|tool_call_end|><|tool_calls_section_end|>

The id is passed on as it is: the model counts calls over the whole conversation.
Source: the tool-call guide of Kimi-K2-Instruct.
"""

import re

from banyan.parsers.incremental import Arriving, Malformed, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, named
from banyan.parsers.tool_calls.tagged import blocks

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_BEHIND_ID = Marks(_ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?")


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    id, _ = yield from named(source, _BEHIND_ID)
    match = _ID.fullmatch(id)
    if match is None:
        raise Malformed
    out.begin(match["name"], id)
    yield from arguments_json(source, out)
    out.end()
    yield from source.spaces()
    yield from source.follows(_CALL_END)


def _tag(name: str) -> tuple[str, str]:
    begin = f"{_SECTION}{_CALL}functions.{name}:0{_ARGUMENTS}"
    return begin, f"{_CALL_END}{_SECTION_END}"


FORMAT = ToolFormat(
    blocks(_CALL, _block, _SECTION, _SECTION_END),
    (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS),
    _tag,
    _SECTION,
)
