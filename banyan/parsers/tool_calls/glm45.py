"""GLM 4.5 and later: the name, then pairs of key and value tags.

    <tool_call>f
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Source: the chat templates of GLM-4.5 and GLM-4.6.
"""

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.tool_calls.base import MAX_NAME_CHARS, Outcome, ToolFormat
from banyan.parsers.tool_calls.markup import Markup, members
from banyan.parsers.tool_calls.tagged import blocks

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BEHIND_NAME = Marks("\n", _KEY, _CLOSER)
_MARKUP = Markup(_KEY, _KEY_END, _VALUE_END, _CLOSER, before_value=_VALUE)


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    yield from source.spaces()
    text, _ = yield from source.collect(_BEHIND_NAME, MAX_NAME_CHARS, keeps_mark=True)
    name = text.strip()
    out.begin(name)
    yield from members(source, out, name, _MARKUP)
    out.end()


FORMAT = ToolFormat(blocks(_OPENER, _block), (_OPENER, _CLOSER, _KEY, _KEY_END, _VALUE, _VALUE_END))
