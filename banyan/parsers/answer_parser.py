"""AnswerParser: an answer's text through the reasoning parser and then the tool-call parser.

Either may be missing. Streamed and whole answers take the same path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.parsers.answer_deltas import AnswerDelta, ReasoningDelta, TextDelta, merge_deltas
from banyan.parsers.reasoning import ReasoningFormat, ReasoningParser, SegmentKind
from banyan.parsers.tool_calls.base import ToolFormat, ToolParser
from banyan.parsers.tool_calls.definitions import Tools


@dataclass(frozen=True)
class AnswerFormat:
    """How to parse the answers to one request.

    Attributes:
        reasoning: None = the model does not reason, or its format is unknown.
        starts_inside: answers start inside the reasoning.
        separates_reasoning: reasoning becomes deltas of its own; otherwise it stays in the text,
            with its markers.
        streams_reasoning: reasoning is streamed; otherwise it is one delta, at its end.
        tools: None = tool calls stay text.
        offered: the tools that the request offers.
        max_calls: calls that are passed on; further ones are parsed and dropped.
    """

    reasoning: ReasoningFormat | None = None
    starts_inside: bool = False
    separates_reasoning: bool = True
    streams_reasoning: bool = True
    tools: ToolFormat | None = None
    offered: Tools = Tools({})
    max_calls: int = 1 << 30

    @property
    def markers(self) -> frozenset[str]:
        """Texts that detokenisation must keep for the parsers, even if they are special tokens."""
        found = (self.reasoning.markers if self.reasoning else ()) + (
            self.tools.markers if self.tools else ()
        )
        return frozenset(found)


class AnswerParser:
    """The parser of one answer."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._reasoning = (
            ReasoningParser(form.reasoning, form.starts_inside) if form.reasoning else None
        )
        self._tools = ToolParser(form.tools, form.offered, form.max_calls) if form.tools else None
        self._held: list[str] = []
        """Reasoning that is not streamed, until its end."""
        self.has_reasoning = False
        self.has_answered = False
        """Whether any text after the reasoning has arrived."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have started and are passed on."""
        return min(self._tools.num_calls, self._form.max_calls) if self._tools else 0

    def feed(self, text: str) -> list[AnswerDelta]:
        """The deltas that the new text decides."""
        if self._reasoning is None:
            return self._text(text)
        return self._deltas(self._reasoning.feed(text))

    def finish(self, is_cut: bool = False) -> list[AnswerDelta]:
        """The remaining deltas, at the end of the answer.

        Args:
            is_cut: the model was stopped early (length, abort, a stop string).
        """
        deltas = self._deltas(self._reasoning.finish()) if self._reasoning else []
        deltas += self._end_reasoning()
        if self._tools is not None:
            deltas += self._tools.finish(is_cut)
        return merge_deltas(deltas) if len(deltas) > 1 else deltas

    def _deltas(self, segments: list[tuple[SegmentKind, str]]) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        for kind, text in segments:
            if kind is SegmentKind.TEXT:
                self.has_answered = True
                deltas += self._end_reasoning() + self._text(text)
                continue
            self.has_reasoning |= kind is SegmentKind.REASONING
            if not self._form.separates_reasoning:
                deltas.append(TextDelta(text))
            elif kind is SegmentKind.REASONING:
                deltas += self._reasoning_text(text)
        return merge_deltas(deltas)

    def _reasoning_text(self, text: str) -> list[AnswerDelta]:
        if self._form.streams_reasoning:
            return [ReasoningDelta(text)]
        self._held.append(text)
        return []

    def _end_reasoning(self) -> list[AnswerDelta]:
        held, self._held = self._held, []
        return [ReasoningDelta("".join(held))] if held else []

    def _text(self, text: str) -> list[AnswerDelta]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [TextDelta(text)] if text else []


class ReasoningTokenCounter:
    """Counts the reasoning tokens of one answer, up to and with the token that ends the reasoning.

    Args:
        end: id of that token; None = the end marker is not one token, and the first text of the
            answer ends the count.
    """

    def __init__(self, end: int | None) -> None:
        self.count = 0
        self._end = end
        self._is_over = False

    def add(self, tokens: Sequence[int], has_answered: bool) -> None:
        """Count the tokens of one chunk; `has_answered` = the answer's text has begun."""
        if self._is_over:
            return
        if self._end is not None and self._end in tokens:
            self.count += list(tokens).index(self._end) + 1
            self._is_over = True
        elif has_answered:
            self._is_over = True
        else:
            self.count += len(tokens)
