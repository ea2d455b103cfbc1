"""gpt-oss: the analysis channel is the thinking (see frontend.answers.harmony).

Messages to functions stay as they are, for the tool-call parser behind this one.
"""

from banyan.parsers import harmony
from banyan.parsers.incremental import Arriving, Reading
from banyan.parsers.reasoning.base import ReasoningFormat, Split

_OPENING = harmony.CHANNEL + "analysis" + harmony.MESSAGE


def _read(source: Arriving, split: Split, is_inside: bool) -> Reading[None]:
    mark = ""
    if is_inside:
        mark = yield from _body(source, split, "analysis", "")
    elif (yield from source.follows(harmony.RECIPIENT)):
        mark = harmony.RECIPIENT
    while mark or (mark := (yield from source.until(harmony.OPENERS, split.say))):
        header = yield from harmony.header(source, mark)
        if header is None:
            split.say(mark)
            mark = ""
            continue
        (split.say if header.tool else split.mark)(header.raw)
        mark = yield from _body(source, split, header.channel, header.tool)


def _body(source: Arriving, split: Split, channel: str, tool: str) -> Reading[str]:
    """The text of one message and its end; returns the opener of the next, if that ended it."""
    is_thought = channel == "analysis" and not tool
    ender = yield from source.until(harmony.ENDERS, split.think if is_thought else split.say)
    following = harmony.after(ender)
    if not following:
        (split.say if tool else split.mark)(ender)
    return following


FORMAT = ReasoningFormat(
    _read,
    _OPENING,
    harmony.END,
    markers=harmony.MARKERS,
    answer=harmony.CHANNEL + "final" + harmony.MESSAGE,
)
