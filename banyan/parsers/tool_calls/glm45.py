"""GLM 4.5 and later: the name, then pairs of key and value tags.

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Source: the chat templates of GLM-4.5 and GLM-4.6.
"""

from banyan.parsers.incremental import Delimiters, Reading, StreamingText
from banyan.parsers.tool_calls.base import MAX_NAME_CHARS, ToolCallWriter, ToolFormat
from banyan.parsers.tool_calls.markup import Markup, read_parameters
from banyan.parsers.tool_calls.tagged import text_with_calls

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_END = Delimiters("\n", _KEY, _CLOSER)
_MARKUP = Markup(_KEY, _KEY_END, _VALUE_END, _CLOSER, value_start=_VALUE)


def _block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    text, _ = yield from source.collect(_NAME_END, MAX_NAME_CHARS, keeps_delimiter=True)
    name = text.strip()
    out.begin_call(name)
    yield from read_parameters(source, out, name, _MARKUP)
    out.end_call()


FORMAT = ToolFormat(
    text_with_calls(_OPENER, _block), (_OPENER, _CLOSER, _KEY, _KEY_END, _VALUE, _VALUE_END)
)
