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


def thinking(
    start: str, end: str, always: bool = False, around: tuple[str, ...] = ()
) -> ReasoningFormat:
    """Format: `start` reasoning `end` answer; with `always`, `start` may be missing.

    Args:
        around: tags around the answer, which belong to neither part.
    """
    ends, tags = Delimiters(end), Delimiters(*around) if around else None

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
        while tags and (tag := (yield from source.until(tags, out.add_text))):
            out.add_delimiter(tag)
        yield from source.rest(out.add_text)

    return ReasoningFormat(read, start, end, always, (start, end, *around))


WHEN_OPENED = thinking("<think>", "</think>")
ALWAYS = thinking("<think>", "</think>", always=True)
KIMI = thinking("◁think▷", "◁/think▷")
APERTUS = thinking("<|inner_prefix|>", "<|inner_suffix|>")
COMMAND = thinking(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    around=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
ERNIE45 = thinking("<think>", "</think>", around=("<response>", "</response>"))
GEMMA4 = thinking("<|channel>thought", "<channel|>")
GRANITE = thinking("Here is my thought process:", "Here is my response:")
HUNYUAN_A13B = thinking("<think>", "</think>", around=("<answer>", "</answer>"))
MINIMAX_M3 = thinking("<mm:think>", "</mm:think>")
MISTRAL = thinking("[THINK]", "[/THINK]")
SEED_OSS = thinking("<seed:think>", "</seed:think>")


_HERE = "banyan.parsers.reasoning"

REASONING_PARSERS: Table[ReasoningFormat] = Table(
    "reasoning parser",
    {
        "apertus2509": f"{_HERE}:APERTUS",
        "cohere_command3": f"{_HERE}:COMMAND",
        "cohere_command4": f"{_HERE}:COMMAND",
        "deepseek-r1": f"{_HERE}:ALWAYS",
        "deepseek-v3": f"{_HERE}:WHEN_OPENED",
        "deepseek-v4": f"{_HERE}:WHEN_OPENED",
        "deepseek-v41": f"{_HERE}:WHEN_OPENED",
        "deepseek_r1": f"{_HERE}:ALWAYS",
        "deepseek_v3": f"{_HERE}:WHEN_OPENED",
        "deepseek_v4": f"{_HERE}:WHEN_OPENED",
        "dots": f"{_HERE}:WHEN_OPENED",
        "ernie45": f"{_HERE}:ERNIE45",
        "gemma4": f"{_HERE}:GEMMA4",
        "gigachat35": f"{_HERE}:ALWAYS",
        "glm45": f"{_HERE}:WHEN_OPENED",
        "gpt-oss": "banyan.parsers.harmony:REASONING_FORMAT",
        "granite": f"{_HERE}:GRANITE",
        "granite_thinking_parser": f"{_HERE}:WHEN_OPENED",
        "hunyuan": f"{_HERE}:WHEN_OPENED",
        "hunyuan_a13b": f"{_HERE}:HUNYUAN_A13B",
        "interns1": f"{_HERE}:WHEN_OPENED",
        "iquest_q1": f"{_HERE}:WHEN_OPENED",
        "kimi": f"{_HERE}:KIMI",
        "kimi_k2": f"{_HERE}:WHEN_OPENED",
        "ling3": f"{_HERE}:WHEN_OPENED",
        "mimo": f"{_HERE}:WHEN_OPENED",
        "minimax": f"{_HERE}:WHEN_OPENED",
        "minimax-m3": f"{_HERE}:MINIMAX_M3",
        "minimax_m2": f"{_HERE}:ALWAYS",
        "mistral": f"{_HERE}:MISTRAL",
        "nanbeige": f"{_HERE}:WHEN_OPENED",
        "nemotron_3": f"{_HERE}:WHEN_OPENED",
        "olmo3": f"{_HERE}:ALWAYS",
        "openai_gptoss": "banyan.parsers.harmony:REASONING_FORMAT",
        "poolside_v1": f"{_HERE}:WHEN_OPENED",
        "qwen3": f"{_HERE}:WHEN_OPENED",
        "qwen3-thinking": f"{_HERE}:ALWAYS",
        "seed_oss": f"{_HERE}:SEED_OSS",
        "step3": f"{_HERE}:ALWAYS",
        "step3p5": f"{_HERE}:ALWAYS",
    },
    plugins="banyan.reasoning_parsers",
)
