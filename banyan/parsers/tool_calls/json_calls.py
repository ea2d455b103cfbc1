"""Calls whose arguments are one JSON object: Hermes, Qwen, Llama, Mistral, Kimi, Command and
others, and bare lists.

Hermes 2 Pro, Qwen 2.5 and Qwen 3 write JSON between tags; Qwen puts each tag on a line of its own:

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

Llama 3.1 to 3.3 write JSON after a tag, or as the whole answer:

    <|python_tag|>{"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}

Mistral has two forms. Older tokenizers write a list; from v11 on they write name and arguments,
with an optional call id:

    [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
    [TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}

Kimi K2 writes a call id that contains the name. It is passed on unchanged, because the model counts
calls over the whole conversation:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}
    <|tool_call_end|><|tool_calls_section_end|>

Other families write an object or a list of them between tags of their own. Apertus writes the name
as the only key:

    <|tools_prefix|>[{"f": {…}}, {"g": {…}}]<|tools_suffix|>

Sources: the model card of NousResearch/Hermes-2-Pro and its function-calling repository; the chat
templates of Qwen2.5-Instruct and Qwen3; the prompt-format pages of Llama 3.1 and 3.2; the
tokenizers of mistral-common; the tool-call guide of Kimi-K2-Instruct.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText, after_space
from banyan.parsers.tool_calls.base import (
    ToolCallWriter,
    ToolFormat,
    read_arguments,
    read_call,
    read_name,
    read_or_text,
    read_string,
)

MAX_STRAY = 64
"""Characters that are looked at for a closing tag after a brace too many."""
Block = Callable[[StreamingText, ToolCallWriter], Reading[None]]


def tagged_json(opener: str, closer: str, takes_tag: bool = True) -> ToolFormat:
    """Any number of `opener` {"name": …, "arguments": {…}} `closer`, with text between them.

    Models also write several objects between two tags, a brace too many, or one too few.

    Args:
        takes_tag: a grammar may force a call between the tags.
    """

    more, braces = Delimiters("{"), Delimiters("}" + closer, "}\n" + closer)

    def block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        yield from read_calls(source, out)
        while (yield from after_space(source, more, 8))[1]:
            yield from read_call(source, out)
        stray = yield from after_space(source, braces, MAX_STRAY)
        if stray[1]:
            source.take(stray[0] + 1)
        yield from source.spaces()
        yield from source.follows(closer)

    def tag(name: str) -> tuple[str, str]:
        return f'{opener}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{closer}"

    read = text_with_calls(opener, block, closer=closer)
    if not takes_tag:
        return ToolFormat(read, (opener, closer))
    return ToolFormat(read, (opener, closer), tag, opener)


def with_unmarked_first_call(format: ToolFormat) -> ToolFormat:
    """`format`, but the answer may also start with a call without tags, which must name one of the
    tools. Models that were not trained on the tags often leave them out."""

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        out.add_text((yield from source.spaces()))
        if (yield from source.peek()) == "{":
            yield from read_or_text(source, out, "", read_call(source, out, only_known=True))
        yield from format.read(source, out)

    return replace(format, read=read)


def text_with_calls(opener: str, block: Block, *ignored: str, closer: str = "") -> Block:
    """Reader of a whole answer: text, and a call read by `block` after every `opener`.

    Args:
        ignored: texts that are left out.
        closer: left out after a call, also after a malformed one.
    """
    delimiters, after = Delimiters(opener, *ignored), Delimiters(closer or opener)

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        while found := (yield from source.until(delimiters, out.add_text)):
            if found == opener:
                before = out.num_calls
                yield from read_or_text(source, out, opener, block(source, out))
                if closer and out.num_calls > before:
                    at, _ = yield from after_space(source, after, MAX_STRAY)
                    if (yield from source.peek(at + len(closer)))[at:] == closer:
                        source.take(at + len(closer))

    return read


def read_calls(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    """One call object, or a list of them."""
    yield from source.spaces()
    if not (yield from source.follows("[")):
        yield from read_call(source, out)
        return
    yield from source.spaces()
    while not (yield from source.follows("]")):
        yield from read_call(source, out)
        yield from source.spaces()
        if not (yield from source.follows(",")) and (yield from source.need()) != "]":
            raise Malformed
        yield from source.spaces()


def _read_bare_list(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from read_or_text(source, out, "", read_calls(source, out))
    yield from source.rest(out.add_text)


BARE_LIST = ToolFormat(_read_bare_list)
"""[{"name": "f", "parameters": {…}}, …] without tags. A grammar forces it if tool_choice is
"required" or names a function."""


QWEN25 = tagged_json("<tool_call>", "</tool_call>")
HERMES = tagged_json("<tool_call>", "</tool_call>")
JAMBA = tagged_json("<tool_calls>", "</tool_calls>")
"""Jamba, MiniMax-M1 and Hunyuan A13B."""
COMMAND = tagged_json("<|START_ACTION|>", "<|END_ACTION|>", takes_tag=False)
LONGCAT = tagged_json("<longcat_tool_call>", "</longcat_tool_call>")
GRANITE = tagged_json("<|tool_call|>", "<|end_of_text|>", takes_tag=False)
GRANITE_20B = tagged_json("<function_call>", "</function_call>", takes_tag=False)
PHI4_MINI = tagged_json("functools", "<|/tool_call|>", takes_tag=False)
_PLUGIN = "<|plugin|>"


def _ernie(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from read_calls(source, out)
    yield from source.spaces()
    yield from source.follows("</tool_call>")


ERNIE45 = ToolFormat(
    text_with_calls("<tool_call>", _ernie, "<response>", "</response>", closer="</tool_call>"),
    ("<tool_call>", "</tool_call>"),
)


def _internlm(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    yield from source.expect(_PLUGIN)
    yield from read_calls(source, out)
    yield from source.spaces()
    yield from source.follows("<|action_end|>")


INTERNLM = ToolFormat(
    text_with_calls("<|action_start|>", _internlm, closer="<|action_end|>"),
    ("<|action_start|>", "<|action_end|>", _PLUGIN),
)

_GIGACHAT_END = "<|message_sep|>"
_GIGACHAT_TEXT = Delimiters("function call<|role_sep|>\n", "<|function_call|>", _GIGACHAT_END)


def _read_gigachat(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    while found := (yield from source.until(_GIGACHAT_TEXT, out.add_text)):
        if found != _GIGACHAT_END:
            yield from read_or_text(source, out, found, read_call(source, out))


GIGACHAT3 = ToolFormat(_read_gigachat, ("<|role_sep|>", "<|function_call|>", _GIGACHAT_END))


def _apertus(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    yield from source.expect("[")
    yield from source.spaces()
    while not (yield from source.follows("]")):
        yield from source.expect("{")
        yield from source.spaces()
        out.begin_call((yield from read_string(source)))
        yield from source.spaces()
        yield from source.expect(":")
        yield from read_arguments(source, out)
        yield from source.spaces()
        yield from source.expect("}")
        out.end_call()
        yield from source.spaces()
        if not (yield from source.follows(",")) and (yield from source.need()) != "]":
            raise Malformed
        yield from source.spaces()
    yield from source.spaces()
    yield from source.follows("<|tools_suffix|>")


APERTUS = ToolFormat(
    text_with_calls("<|tools_prefix|>", _apertus, closer="<|tools_suffix|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
)

_XLAM_OPENERS = Delimiters("```json", "<tool_call>", "[TOOL_CALLS]")
_XLAM_ENDS = {"```json": "```", "<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}


def _read_xlam(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    """A bare list at the start, or lists in one of three kinds of frames."""
    out.add_text((yield from source.spaces()))
    if (yield from source.peek()) == "[" and (yield from source.peek(2)) != "[T":
        yield from read_or_text(source, out, "", _known_calls(source, out))
    while opener := (yield from source.until(_XLAM_OPENERS, out.add_text)):
        yield from read_or_text(source, out, opener, _known_calls(source, out, _XLAM_ENDS[opener]))


def _known_calls(source: StreamingText, out: ToolCallWriter, end: str = "") -> Reading[None]:
    yield from source.spaces()
    yield from source.expect("[")
    yield from source.spaces()
    while not (yield from source.follows("]")):
        yield from read_call(source, out, only_known=True)
        yield from source.spaces()
        if not (yield from source.follows(",")) and (yield from source.need()) != "]":
            raise Malformed
        yield from source.spaces()
    if end:
        yield from source.spaces()
        yield from source.follows(end)


XLAM = ToolFormat(_read_xlam, ("[TOOL_CALLS]",))


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_DELIMITERS = Delimiters(_LLAMA_TAG)


def _read_llama(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    out.add_text((yield from source.spaces()))
    if (yield from source.peek()) == "{":
        yield from _llama_calls(source, out, "", only_known=True)
    while opener := (yield from source.until(_LLAMA_DELIMITERS, out.add_text)):
        yield from _llama_calls(source, out, opener, only_known=False)


def _llama_calls(
    source: StreamingText, out: ToolCallWriter, opener: str, only_known: bool
) -> Reading[None]:
    """Calls separated by semicolons."""
    while (yield from read_or_text(source, out, opener, read_call(source, out, only_known))):
        opener, only_known = (yield from source.spaces()), True
        if (yield from source.follows(";")):
            opener += ";" + (yield from source.spaces())
        if (yield from source.peek()) != "{":
            out.add_text(opener)
            return


def _llama_tag(name: str) -> tuple[str, str]:
    return f'{_LLAMA_TAG}{{"name": {json.dumps(name)}, "parameters": ', "}"


LLAMA3 = ToolFormat(_read_llama, (_LLAMA_TAG,), _llama_tag, _LLAMA_TAG)


_MISTRAL_OPENER = "[TOOL_CALLS]"
_MISTRAL_ID, _MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME_END = Delimiters(_MISTRAL_ID, _MISTRAL_ARGUMENTS)
_MISTRAL_ID_END = Delimiters(_MISTRAL_ARGUMENTS)
_MISTRAL_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def _mistral_calls(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    yield from source.spaces()
    if (yield from source.need()) in "[{":
        yield from read_calls(source, out)
        return
    name, end = yield from read_name(source, _MISTRAL_NAME_END)
    if not _MISTRAL_NAME.fullmatch(name):
        raise Malformed
    id = ""
    if end == _MISTRAL_ID:
        id, _ = yield from read_name(source, _MISTRAL_ID_END)
    out.begin_call(name, id)
    yield from read_arguments(source, out)
    out.end_call()


def _mistral_tag(name: str) -> tuple[str, str]:
    return f'{_MISTRAL_OPENER} [{{"name": {json.dumps(name)}, "arguments": ', "}]"


MISTRAL = ToolFormat(
    text_with_calls(_MISTRAL_OPENER, _mistral_calls),
    (_MISTRAL_OPENER, _MISTRAL_ID, _MISTRAL_ARGUMENTS),
    _mistral_tag,
    _MISTRAL_OPENER,
    id_chars=9,
)


_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_SINGULAR = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")
"""Tags that the model writes by mistake."""
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID_END = Delimiters(_KIMI_ARGUMENTS)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::[0-9]+)?")


def _kimi_call(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    id, _ = yield from read_name(source, _KIMI_ID_END)
    match = _KIMI_ID.fullmatch(id)
    if match is None:
        raise Malformed
    out.begin_call(match["name"], id)
    yield from read_arguments(source, out)
    out.end_call()
    yield from source.spaces()
    yield from source.follows(_KIMI_CALL_END)


def _kimi_tag(name: str) -> tuple[str, str]:
    begin = f"{_KIMI_SECTION}{_KIMI_CALL}functions.{name}:0{_KIMI_ARGUMENTS}"
    return begin, f"{_KIMI_CALL_END}{_KIMI_SECTION_END}"


KIMI_K2 = ToolFormat(
    text_with_calls(_KIMI_CALL, _kimi_call, _KIMI_SECTION, _KIMI_SECTION_END, *_KIMI_SINGULAR),
    (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS),
    _kimi_tag,
    _KIMI_SECTION,
)
