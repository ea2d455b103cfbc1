"""Kimi K2: a call id that contains the name, then plain JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}
    <|tool_call_end|><|tool_calls_section_end|>

The id is passed on unchanged, because the model counts calls over the whole conversation.
Source: the tool-call guide of Kimi-K2-Instruct.
"""

import re

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_arguments, read_name
from banyan.parsers.tool_calls.tagged import text_with_calls

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID_END = Delimiters(_ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?")


def _block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    id, _ = yield from read_name(source, _ID_END)
    match = _ID.fullmatch(id)
    if match is None:
        raise Malformed
    out.begin_call(match["name"], id)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_CALL_END)


def _tag(name: str) -> tuple[str, str]:
    begin = f"{_SECTION}{_CALL}functions.{name}:0{_ARGUMENTS}"
    return begin, f"{_CALL_END}{_SECTION_END}"


FORMAT = ToolFormat(
    text_with_calls(_CALL, _block, _SECTION, _SECTION_END),
    (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS),
    _tag,
    _SECTION,
)
