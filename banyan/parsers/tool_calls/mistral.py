"""Mistral: calls behind [TOOL_CALLS], in the list of JSON objects of the older tokenizers or in the
name-and-arguments form of the newer ones (v11 and later), with an optional call id.

    [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
    [TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}

Source: the tokenizers of mistral-common.
"""

import json
import re

from banyan.parsers.incremental import Arriving, Malformed, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, named
from banyan.parsers.tool_calls.tagged import blocks, calls_json

_OPENER = "[TOOL_CALLS]"
_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_BEHIND_NAME = Marks(_ID, _ARGUMENTS)
_BEHIND_ID = Marks(_ARGUMENTS)
_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    yield from source.spaces()
    if (yield from source.need()) in "[{":
        yield from calls_json(source, out)
        return
    name, mark = yield from named(source, _BEHIND_NAME)
    if not _NAME.fullmatch(name):
        raise Malformed
    id = ""
    if mark == _ID:
        id, _ = yield from named(source, _BEHIND_ID)
    out.begin(name, id)
    yield from arguments_json(source, out)
    out.end()


def _tag(name: str) -> tuple[str, str]:
    return f'{_OPENER} [{{"name": {json.dumps(name)}, "arguments": ', "}]"


FORMAT = ToolFormat(blocks(_OPENER, _block), (_OPENER, _ID, _ARGUMENTS), _tag, _OPENER, id_chars=9)
