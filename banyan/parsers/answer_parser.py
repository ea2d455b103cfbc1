"""AnswerParser: an answer's text through the reasoning parser and then the tool-call parser.

Either may be missing. One path for streams and whole answers. Knows no HTTP.
"""

from dataclasses import dataclass

from banyan.parsers.parts import Part, Said, Thought, joined
from banyan.parsers.reasoning.base import Kind, ReasoningFormat, ReasoningParser
from banyan.parsers.tool_calls.base import ToolFormat, ToolParser
from banyan.parsers.tool_calls.definitions import Tools


@dataclass(frozen=True)
class AnswerForm:
    """How the answers to one request are to be read.

    Attributes:
        reasoning: None = the model does not think, or nobody knows how it marks it.
        is_inside: answers begin inside of the thinking.
        separates: thoughts are parts of their own; otherwise they are said, with their marks.
        streams_thought: thoughts come while they arrive; otherwise each when it is over.
        tools: None = calls are not looked for.
    """

    reasoning: ReasoningFormat | None = None
    is_inside: bool = False
    separates: bool = True
    streams_thought: bool = True
    tools: ToolFormat | None = None
    offered: Tools = Tools({})
    max_calls: int = 1 << 30

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parsers must see, though a vocabulary may call them special."""
        found = (self.reasoning.markers if self.reasoning else ()) + (
            self.tools.markers if self.tools else ()
        )
        return frozenset(found)


class AnswerParser:
    """The parser of one answer."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._reasoning = (
            ReasoningParser(form.reasoning, form.is_inside) if form.reasoning else None
        )
        self._tools = ToolParser(form.tools, form.offered, form.max_calls) if form.tools else None
        self._held: list[str] = []
        self.has_thought = False
        self.has_answered = False
        """Whether anything but thinking has come."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun and are passed on."""
        return min(self._tools.num_calls, self._form.max_calls) if self._tools else 0

    def feed(self, text: str) -> list[Part]:
        """What the new text makes certain."""
        if self._reasoning is None:
            return self._said(text)
        return self._parts(self._reasoning.feed(text))

    def finish(self, is_cut: bool = False) -> list[Part]:
        """The rest, when nothing follows.

        Args:
            is_cut: the model was stopped before it was done (length, abort, a stop text).
        """
        parts = self._parts(self._reasoning.finish()) if self._reasoning else []
        parts += self._thought_over()
        if self._tools is not None:
            parts += self._tools.finish(is_cut)
        return joined(parts)

    def _parts(self, pieces: list[tuple[Kind, str]]) -> list[Part]:
        parts: list[Part] = []
        for kind, text in pieces:
            if kind is Kind.SAID:
                self.has_answered = True
                parts += self._thought_over() + self._said(text)
                continue
            self.has_thought |= kind is Kind.THOUGHT
            if not self._form.separates:
                parts.append(Said(text))
            elif kind is Kind.THOUGHT:
                parts += self._thought(text)
        return joined(parts)

    def _thought(self, text: str) -> list[Part]:
        if self._form.streams_thought:
            return [Thought(text)]
        self._held.append(text)
        return []

    def _thought_over(self) -> list[Part]:
        held, self._held = self._held, []
        return [Thought("".join(held))] if held else []

    def _said(self, text: str) -> list[Part]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Said(text)] if text else []
