"""Reasoning between two tags at the start of an answer: DeepSeek, Qwen, GLM, Step, Kimi.

Tags later in an answer are text. Sources: the models' chat templates and model cards.
"""

from banyan.parsers.incremental import Delimiters, Reading, StreamingText
from banyan.parsers.reasoning.base import ReasoningFormat, ReasoningWriter


def thinking(start: str, end: str, always: bool = False) -> ReasoningFormat:
    """Format: `start` reasoning `end` answer; with `always`, `start` may be missing."""
    ends = Delimiters(end)

    def read(source: StreamingText, out: ReasoningWriter, starts_inside: bool) -> Reading[None]:
        space = yield from source.spaces()
        has_start = yield from source.follows(start)
        if has_start:
            space += start + (yield from source.spaces())
        if has_start or starts_inside:
            out.add_delimiter(space)
            if found := (yield from source.until(ends, out.add_reasoning)):
                out.add_delimiter(found + (yield from source.spaces()))
        else:
            out.add_text(space)
        yield from source.rest(out.add_text)

    return ReasoningFormat(read, start, end, always, (start, end))


WHEN_OPENED = thinking("<think>", "</think>")
ALWAYS = thinking("<think>", "</think>", always=True)
KIMI = thinking("◁think▷", "◁/think▷")
