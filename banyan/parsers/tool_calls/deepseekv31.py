"""DeepSeek V3.1: name, separator, plain JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat template and model card of DeepSeek-V3.1.
"""

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, named
from banyan.parsers.tool_calls.deepseekv3 import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    MARKERS,
    SEPARATOR,
)
from banyan.parsers.tool_calls.tagged import blocks

_BEHIND_NAME = Marks(SEPARATOR)


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    name, _ = yield from named(source, _BEHIND_NAME)
    out.begin(name)
    yield from arguments_json(source, out)
    out.end()
    yield from source.spaces()
    yield from source.follows(CALL_END)


def _tag(name: str) -> tuple[str, str]:
    return f"{CALLS}{CALL}{name}{SEPARATOR}", f"{CALL_END}{CALLS_END}"


FORMAT = ToolFormat(blocks(CALL, _block, CALLS, CALLS_END), MARKERS, _tag, CALLS)
