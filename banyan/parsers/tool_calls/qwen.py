"""Hermes 2 Pro, Qwen 2.5, Qwen 3 and Qwen3-Coder: calls between <tool_call> tags.

Hermes, Qwen 2.5 and Qwen 3 write JSON; Qwen puts each tag on a line of its own:

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

Qwen3-Coder writes tags that contain the names, and sometimes leaves out the outer tag:

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Sources: the model card of NousResearch/Hermes-2-Pro and its function-calling repository; the chat
templates of Qwen2.5-Instruct, Qwen3 and Qwen3-Coder.
"""

from banyan.parsers.incremental import Delimiters, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_name, read_or_text
from banyan.parsers.tool_calls.markup import Markup, read_parameters
from banyan.parsers.tool_calls.tagged import tagged_json

QWEN25 = tagged_json("<tool_call>", "</tool_call>")
HERMES = tagged_json("<tool_call>", "</tool_call>")

_OUTER, _OUTER_END, _INNER = "<tool_call>", "</tool_call>", "<function="
_DELIMITERS = Delimiters(_OUTER, _INNER)
_NAME_END = Delimiters(">")
_MARKUP = Markup("<parameter=", ">", "</parameter>", "</function>", is_lines=True)


def _read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    while opener := (yield from source.until(_DELIMITERS, out.add_text)):
        yield from read_or_text(source, out, opener, _block(source, out, opener))


def _block(source: StreamingText, out: ToolCallWriter, opener: str) -> Reading[None]:
    if opener == _OUTER:
        yield from source.spaces()
        yield from source.expect(_INNER)
    name, _ = yield from read_name(source, _NAME_END)
    out.begin_call(name)
    yield from read_parameters(source, out, name, _MARKUP)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_OUTER_END)


QWEN3_CODER = ToolFormat(_read, (_OUTER, _OUTER_END))
