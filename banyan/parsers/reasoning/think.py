"""Thinking between two tags at the start of an answer: DeepSeek, Qwen, GLM, Step, Kimi.

Tags further on in an answer are text. Sources: the models' chat templates and model cards.
"""

from banyan.parsers.incremental import Arriving, Marks, Reading
from banyan.parsers.reasoning.base import ReasoningFormat, Split


def thinking(start: str, end: str, always: bool = False) -> ReasoningFormat:
    """`start` thought `end` answer; with `always`, `start` may be missing."""
    ends = Marks(end)

    def read(source: Arriving, split: Split, is_inside: bool) -> Reading[None]:
        space = yield from source.spaces()
        has_start = yield from source.follows(start)
        if has_start:
            space += start + (yield from source.spaces())
        if has_start or is_inside:
            split.mark(space)
            if mark := (yield from source.until(ends, split.think)):
                split.mark(mark + (yield from source.spaces()))
        else:
            split.say(space)
        yield from source.rest(split.say)

    return ReasoningFormat(read, start, end, always, (start, end))


WHEN_OPENED = thinking("<think>", "</think>")
ALWAYS = thinking("<think>", "</think>", always=True)
KIMI = thinking("◁think▷", "◁/think▷")
