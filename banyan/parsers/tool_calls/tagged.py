"""JSON calls, between two tags or bare: the base of the formats that differ only in their tags."""

import json
from collections.abc import Callable
from dataclasses import replace

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_call, read_or_text

Block = Callable[[StreamingText, ToolCallWriter], Reading[None]]


def tagged_json(opener: str, closer: str) -> ToolFormat:
    """Any number of `opener` {"name": …, "arguments": {…}} `closer`, with text between them."""

    def block(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        yield from read_calls(source, out)
        yield from source.spaces()
        yield from source.follows(closer)

    def tag(name: str) -> tuple[str, str]:
        return f'{opener}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{closer}"

    return ToolFormat(text_with_calls(opener, block), (opener, closer), tag, opener)


def with_unmarked_first_call(format: ToolFormat) -> ToolFormat:
    """`format`, but the answer may also start with a call without tags, which must name one of the
    tools. Models that were not trained on the tags often leave them out."""

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        out.add_text((yield from source.spaces()))
        if (yield from source.peek()) == "{":
            yield from read_or_text(source, out, "", read_call(source, out, only_known=True))
        yield from format.read(source, out)

    return replace(format, read=read)


def text_with_calls(opener: str, block: Block, *ignored: str) -> Block:
    """Reader of a whole answer: text, and a call read by `block` after every `opener`. `ignored`
    texts are left out."""
    delimiters = Delimiters(opener, *ignored)

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        while found := (yield from source.until(delimiters, out.add_text)):
            if found == opener:
                yield from read_or_text(source, out, opener, block(source, out))

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
"""[{"name": "f", "parameters": {…}}, …] without any tags: what a grammar forces if tool_choice is
"required" or names a function."""
