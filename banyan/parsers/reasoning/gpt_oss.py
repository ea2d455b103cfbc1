"""gpt-oss: the analysis channel is the reasoning (see banyan.parsers.harmony).

Messages to functions pass through unchanged, for the tool-call parser that follows.
"""

from banyan.parsers import harmony
from banyan.parsers.incremental import Reading, StreamingText
from banyan.parsers.reasoning.base import ReasoningFormat, ReasoningWriter

_OPENING = harmony.CHANNEL + "analysis" + harmony.MESSAGE


def _read(source: StreamingText, out: ReasoningWriter, starts_inside: bool) -> Reading[None]:
    opener = ""
    if starts_inside:
        opener = yield from _body(source, out, "analysis", "")
    elif (yield from source.follows(harmony.RECIPIENT)):
        opener = harmony.RECIPIENT
    while opener or (opener := (yield from source.until(harmony.OPENERS, out.add_text))):
        header = yield from harmony.read_header(source, opener)
        if header is None:
            out.add_text(opener)
            opener = ""
            continue
        (out.add_text if header.tool else out.add_delimiter)(header.raw)
        opener = yield from _body(source, out, header.channel, header.tool)


def _body(source: StreamingText, out: ReasoningWriter, channel: str, tool: str) -> Reading[str]:
    """Read one message's text and its end. Returns the next message's opener, if that ended it."""
    is_reasoning = channel == "analysis" and not tool
    ender = yield from source.until(
        harmony.ENDERS, out.add_reasoning if is_reasoning else out.add_text
    )
    following = harmony.next_opener(ender)
    if not following:
        (out.add_text if tool else out.add_delimiter)(ender)
    return following


FORMAT = ReasoningFormat(
    _read,
    _OPENING,
    harmony.END,
    markers=harmony.MARKERS,
    answer=harmony.CHANNEL + "final" + harmony.MESSAGE,
)
