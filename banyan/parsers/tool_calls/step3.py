"""Step-3: XML of a namespace of its own inside of special tokens.

    <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
    <steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Source: the chat template of step3.
"""

from banyan.parsers.incremental import Arriving, Malformed, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, named
from banyan.parsers.tool_calls.markup import Markup, members
from banyan.parsers.tool_calls.tagged import blocks

_CALLS, _CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_SEPARATOR = "<｜tool_sep｜>"
_BEHIND_KIND = Marks(_SEPARATOR)
_BEHIND_NAME = Marks('">')
_MARKUP = Markup('<steptml:parameter name="', '">', "</steptml:parameter>", "</steptml:invoke>")


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    kind, _ = yield from named(source, _BEHIND_KIND)
    if kind != "function":
        raise Malformed
    yield from source.spaces()
    yield from source.expect('<steptml:invoke name="')
    name, _ = yield from named(source, _BEHIND_NAME)
    out.begin(name)
    yield from members(source, out, name, _MARKUP)
    out.end()
    yield from source.spaces()
    yield from source.follows(_CALL_END)


FORMAT = ToolFormat(
    blocks(_CALL, _block, _CALLS, _CALLS_END),
    (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
)
