"""Reasoning parsers: divide an answer into reasoning and answer, incrementally.

Nothing is lost: the texts of all segments concatenate to the input. Sources of the formats: the
models' chat templates and model cards. Entry point for more: "banyan.reasoning_parsers".
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from banyan.base.table import Table
from banyan.parsers.incremental import Delimiters, Reading, StreamingText


class SegmentKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    DELIMITER = "delimiter"
    """Tags, headers and the white space around them."""


ReasoningSegment = tuple[SegmentKind, str]


class ReasoningWriter:
    """Collects the segments that a format reads.

    White space at the end of the reasoning and before the answer counts as delimiter.
    """

    def __init__(self) -> None:
        self._segments: list[ReasoningSegment] = []
        self._space = ""

    def add_reasoning(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._append(SegmentKind.REASONING, kept)

    def add_delimiter(self, text: str) -> None:
        self._append(SegmentKind.DELIMITER, self._space + text)
        self._space = ""

    def add_text(self, text: str) -> None:
        self.add_delimiter("")
        self._append(SegmentKind.TEXT, text)

    def take(self) -> list[ReasoningSegment]:
        segments, self._segments = self._segments, []
        return segments

    def _append(self, kind: SegmentKind, text: str) -> None:
        if not text:
            return
        if self._segments and self._segments[-1][0] is kind:
            text = self._segments.pop()[1] + text
        self._segments.append((kind, text))


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model family marks its reasoning.

    Attributes:
        read: reads a whole answer; arguments: the text, the writer, and whether the answer starts
            inside the reasoning.
        start, end: texts around the reasoning, in a prompt or an answer.
        always: an answer starts with reasoning unless the prompt has closed it.
        markers: texts that detokenisation must keep, even if they are special tokens.
        answer: text before an answer that follows reasoning; "" = `end`.
    """

    read: Callable[[StreamingText, ReasoningWriter, bool], Reading[None]]
    start: str
    end: str
    always: bool = False
    markers: tuple[str, ...] = ()
    answer: str = ""

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the end of `prompt` makes its answer start inside the reasoning."""
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return True
        return self.always and not tail.endswith(self.end)


class ReasoningParser:
    """The reasoning parser of one answer.

    Args:
        is_inside: the answer begins inside of the thinking (`ReasoningFormat.starts_in_reasoning`).
    """

    def __init__(self, format: ReasoningFormat, starts_inside: bool) -> None:
        self._source = StreamingText()
        self._writer = ReasoningWriter()
        self._reading = format.read(self._source, self._writer, starts_inside)
        self._is_done = False

    def feed(self, text: str) -> list[ReasoningSegment]:
        """The segments that the new text decides."""
        self._source.add(text)
        self._advance()
        return self._writer.take()

    def finish(self) -> list[ReasoningSegment]:
        """The remaining segments, at the end of the answer."""
        self._source.end()
        self._advance()
        self._writer.add_delimiter("")
        return self._writer.take()

    def _advance(self) -> None:
        if self._is_done:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._is_done = True


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


_HERE = "banyan.parsers.reasoning"

REASONING_PARSERS: Table[ReasoningFormat] = Table(
    "reasoning parser",
    {
        "deepseek-r1": f"{_HERE}:ALWAYS",
        "deepseek-v3": f"{_HERE}:WHEN_OPENED",
        "glm45": f"{_HERE}:WHEN_OPENED",
        "gpt-oss": "banyan.parsers.harmony:REASONING_FORMAT",
        "kimi": f"{_HERE}:KIMI",
        "qwen3": f"{_HERE}:WHEN_OPENED",
        "qwen3-thinking": f"{_HERE}:ALWAYS",
        "step3": f"{_HERE}:ALWAYS",
    },
    plugins="banyan.reasoning_parsers",
)
