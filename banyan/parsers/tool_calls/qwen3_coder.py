"""Qwen3-Coder: tags with the name in them.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The outer tag is sometimes left out by the models. Source: the chat template of Qwen3-Coder.
"""

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, attempt, named
from banyan.parsers.tool_calls.markup import Markup, members

_OUTER, _OUTER_END, _INNER = "<tool_call>", "</tool_call>", "<function="
_MARKS = Marks(_OUTER, _INNER)
_BEHIND_NAME = Marks(">")
_MARKUP = Markup("<parameter=", ">", "</parameter>", "</function>", is_lines=True)


def _read(source: Arriving, out: Outcome) -> Reading[None]:
    while mark := (yield from source.until(_MARKS, out.say)):
        yield from attempt(source, out, mark, _block(source, out, mark))


def _block(source: Arriving, out: Outcome, mark: str) -> Reading[None]:
    if mark == _OUTER:
        yield from source.spaces()
        yield from source.expect(_INNER)
    name, _ = yield from named(source, _BEHIND_NAME)
    out.begin(name)
    yield from members(source, out, name, _MARKUP)
    out.end()
    yield from source.spaces()
    yield from source.follows(_OUTER_END)


FORMAT = ToolFormat(_read, (_OUTER, _OUTER_END))
