"""DeepSeek V3 and R1: the name behind a separator, the arguments in a fenced JSON block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {…}
    ```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

Source: the chat template of DeepSeek-V3-0324.
"""

from banyan.parsers.incremental import Arriving, Malformed, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, arguments_json, named
from banyan.parsers.tool_calls.tagged import blocks

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

_BEHIND_KIND = Marks(SEPARATOR)
_BEHIND_NAME = Marks("\n")


def _block(source: Arriving, out: Outcome) -> Reading[None]:
    kind, _ = yield from named(source, _BEHIND_KIND)
    if kind != "function":
        raise Malformed
    name, _ = yield from named(source, _BEHIND_NAME)
    yield from source.spaces()
    yield from source.expect("```json")
    out.begin(name)
    yield from arguments_json(source, out)
    out.end()
    yield from source.spaces()
    yield from source.follows("```")
    yield from source.spaces()
    yield from source.follows(CALL_END)


def _tag(name: str) -> tuple[str, str]:
    begin = f"{CALLS}{CALL}function{SEPARATOR}{name}\n```json\n"
    return begin, f"\n```{CALL_END}{CALLS_END}"


FORMAT = ToolFormat(blocks(CALL, _block, CALLS, CALLS_END), MARKERS, _tag, CALLS)
