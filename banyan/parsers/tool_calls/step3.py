"""Step-3: XML in the namespace steptml, between special tokens.

    <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
    <steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Source: the chat template of step3.
"""

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_name
from banyan.parsers.tool_calls.markup import Markup, read_parameters
from banyan.parsers.tool_calls.tagged import text_with_calls

_CALLS, _CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_SEPARATOR = "<｜tool_sep｜>"
_KIND_END = Delimiters(_SEPARATOR)
_NAME_END = Delimiters('">')
_MARKUP = Markup('<steptml:parameter name="', '">', "</steptml:parameter>", "</steptml:invoke>")


def _block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    kind, _ = yield from read_name(source, _KIND_END)
    if kind != "function":
        raise Malformed
    yield from source.spaces()
    yield from source.expect('<steptml:invoke name="')
    name, _ = yield from read_name(source, _NAME_END)
    out.begin_call(name)
    yield from read_parameters(source, out, name, _MARKUP)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_CALL_END)


FORMAT = ToolFormat(
    text_with_calls(_CALL, _block, _CALLS, _CALLS_END),
    (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
)
