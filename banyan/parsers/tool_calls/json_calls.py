"""Calls whose arguments are one JSON object: Hermes, Qwen, Llama, Mistral, Kimi, and bare lists.

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
)

MAX_STRAY = 64
"""Characters that are looked at for a closing tag after a brace too many."""
Block = Callable[[StreamingText, ToolCallWriter], Reading[None]]


def tagged_json(opener: str, closer: str) -> ToolFormat:
    """Any number of `opener` {"name": …, "arguments": {…}} `closer`, with text between them.

    Models also write several objects between two tags, a brace too many, or one too few.
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

    return ToolFormat(text_with_calls(opener, block, closer=closer), (opener, closer), tag, opener)


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
