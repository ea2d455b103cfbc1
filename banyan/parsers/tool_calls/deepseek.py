"""DeepSeek's forms of tool calls: V3 and R1, V3.1, V3.2 and later.

V3 and R1 put the name after a separator and the arguments in a fenced JSON block:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {…}
    ```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

V3.1 writes name, separator and plain JSON:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2 writes DSML tags, which mark the values that are text. Instead of parameters an invoke may
hold one JSON object:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 calls the outer tag tool_calls; V4.1 calls it "calls" and writes a space before every tag's name.

Sources: the chat templates of DeepSeek-V3-0324 and DeepSeek-V3.1, the model card of DeepSeek-V3.1,
the encoding folder of the DeepSeek-V3.2 model repository.
"""

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_arguments, read_name
from banyan.parsers.tool_calls.json_calls import text_with_calls
from banyan.parsers.tool_calls.markup import Markup, read_parameters

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
_AT_SEPARATOR, _AT_LINE_END = Delimiters(_SEPARATOR), Delimiters("\n")


def _v3_call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    kind, _ = yield from read_name(source, _AT_SEPARATOR)
    if kind != "function":
        raise Malformed
    name, _ = yield from read_name(source, _AT_LINE_END)
    yield from source.spaces()
    yield from source.expect("```json")
    out.begin_call(name)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()
    yield from source.follows("```")
    yield from source.spaces()
    yield from source.follows(_CALL_END)


def _v3_tag(name: str) -> tuple[str, str]:
    begin = f"{_CALLS}{_CALL}function{_SEPARATOR}{name}\n```json\n"
    return begin, f"\n```{_CALL_END}{_CALLS_END}"


def _v31_call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    name, _ = yield from read_name(source, _AT_SEPARATOR)
    out.begin_call(name)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_CALL_END)


def _v31_tag(name: str) -> tuple[str, str]:
    return f"{_CALLS}{_CALL}{name}{_SEPARATOR}", f"{_CALL_END}{_CALLS_END}"


def _read_key(text: str) -> tuple[str, str]:
    """`city" string="true` -> ("city", "string")."""
    name, _, flag = text.partition('" string="')
    return name, {"true": "string", "false": "any"}.get(flag, "")


def _dsml(calls: str, space: str = "") -> ToolFormat:
    """
    Args:
        calls: name of the tag around all calls.
        space: text before the names of tags.
    """
    around = (f"<｜DSML｜{space}{calls}>", f"</｜DSML｜{space}{calls}>")
    opener, closer = f'<｜DSML｜{space}invoke name="', f"</｜DSML｜{space}invoke>"
    name_end = Delimiters('">')
    markup = Markup(
        f'<｜DSML｜{space}parameter name="',
        '">',
        f"</｜DSML｜{space}parameter>",
        closer,
        (around[1], opener),
        read_key=_read_key,
    )

    def call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        name, _ = yield from read_name(source, name_end)
        out.begin_call(name)
        yield from source.spaces()
        if (yield from source.need()) == "{":
            yield from read_arguments(source, out)
            yield from source.spaces()
            yield from source.follows(closer)
        else:
            yield from read_parameters(source, out, name, markup)
        out.end_call()

    return ToolFormat(text_with_calls(opener, call, *around), ("｜DSML｜",))


V3 = ToolFormat(text_with_calls(_CALL, _v3_call, _CALLS, _CALLS_END), _MARKERS, _v3_tag, _CALLS)
V31 = ToolFormat(text_with_calls(_CALL, _v31_call, _CALLS, _CALLS_END), _MARKERS, _v31_tag, _CALLS)
V32 = _dsml("function_calls")
V4 = _dsml("tool_calls")
V41 = _dsml("calls", " ")
