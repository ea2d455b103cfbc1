"""DeepSeek V3.2: DSML tags, in which the model says itself which values are texts.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Instead of parameters an invoke may hold one JSON object.
Source: the encoding folder of the DeepSeek-V3.2 model repository.
"""

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, named
from banyan.parsers.tool_calls.markup import Markup, members
from banyan.parsers.tool_calls.tagged import blocks

_CALLS, _CALLS_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
_CALL, _CALL_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_BEHIND_NAME = Marks('">')


def _read_key(text: str) -> tuple[str, str]:
    """`city" string="true` -> ("city", "string")."""
    name, _, flag = text.partition('" string="')
    return name, {"true": "string", "false": "any"}.get(flag, "")


_MARKUP = Markup(
    '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>", _CALL_END, read_key=_read_key
)


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    name, _ = yield from named(source, _BEHIND_NAME)
    out.begin(name)
    yield from source.spaces()
    if (yield from source.need()) == "{":
        yield from arguments_json(source, out)
        yield from source.spaces()
        yield from source.follows(_CALL_END)
    else:
        yield from members(source, out, name, _MARKUP)
    out.end()


FORMAT = ToolFormat(blocks(_CALL, _block, _CALLS, _CALLS_END), ("｜DSML｜",))
