"""JSON calls between two tags: the base of the formats that differ in their tags only."""

import json
from collections.abc import Callable
from dataclasses import replace

from banyan.parsers.incremental import Arriving, Malformed, Marks, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, attempt, call_json

Block = Callable[[Arriving, Outcome], Reading[None]]


def tagged_json(opener: str, closer: str) -> ToolFormat:
    """Any number of `opener` {"name": …, "arguments": {…}} `closer`, with text between them."""

    def block(source: Arriving, out: Outcome) -> Reading[None]:
        yield from calls_json(source, out)
        yield from source.spaces()
        yield from source.follows(closer)

    def tag(name: str) -> tuple[str, str]:
        return f'{opener}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{closer}"

    return ToolFormat(blocks(opener, block), (opener, closer), tag, opener)


def bare_first(format: ToolFormat) -> ToolFormat:
    """`format`, in which a whole answer may also begin with a call that nothing marks: models that
    were not taught the tags often leave them out. It must name one of the tools."""

    def read(source: Arriving, out: Outcome) -> Reading[None]:
        out.say((yield from source.spaces()))
        if (yield from source.peek()) == "{":
            yield from attempt(source, out, "", call_json(source, out, only_known=True))
        yield from format.read(source, out)

    return replace(format, read=read)


def blocks(opener: str, block: Block, *ignored: str) -> Block:
    """A whole answer: text, with a `block` behind every `opener`; `ignored` texts are left out."""
    marks = Marks(opener, *ignored)

    def read(source: Arriving, out: Outcome) -> Reading[None]:
        while mark := (yield from source.until(marks, out.say)):
            if mark == opener:
                yield from attempt(source, out, opener, block(source, out))

    return read


def calls_json(source: Arriving, out: Outcome) -> Reading[None]:
    """One call object, or a list of them."""
    yield from source.spaces()
    if not (yield from source.follows("[")):
        yield from call_json(source, out)
        return
    yield from source.spaces()
    while not (yield from source.follows("]")):
        yield from call_json(source, out)
        yield from source.spaces()
        if not (yield from source.follows(",")) and (yield from source.need()) != "]":
            raise Malformed
        yield from source.spaces()
