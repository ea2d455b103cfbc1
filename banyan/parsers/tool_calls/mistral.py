"""Mistral: calls after [TOOL_CALLS]. Older tokenizers write a list of JSON objects; tokenizers from
v11 on write name and arguments, with an optional call id.

    [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
    [TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}

Source: the tokenizers of mistral-common.
"""

import json
import re

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_arguments, read_name
from banyan.parsers.tool_calls.tagged import read_calls, text_with_calls

_OPENER = "[TOOL_CALLS]"
_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_NAME_END = Delimiters(_ID, _ARGUMENTS)
_ID_END = Delimiters(_ARGUMENTS)
_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def _block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    if (yield from source.need()) in "[{":
        yield from read_calls(source, out)
        return
    name, end = yield from read_name(source, _NAME_END)
    if not _NAME.fullmatch(name):
        raise Malformed
    id = ""
    if end == _ID:
        id, _ = yield from read_name(source, _ID_END)
    out.begin_call(name, id)
    yield from read_arguments(source, out)
    out.end_call()


def _tag(name: str) -> tuple[str, str]:
    return f'{_OPENER} [{{"name": {json.dumps(name)}, "arguments": ', "}]"


FORMAT = ToolFormat(
    text_with_calls(_OPENER, _block), (_OPENER, _ID, _ARGUMENTS), _tag, _OPENER, id_chars=9
)
