"""Shapes of messages, whole or as events: blocks of text, thinking and tool use, one after another.

A whole message is what its events add up to.
"""

from collections.abc import Mapping
from typing import cast

import orjson

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from banyan.requests.generation import Finish, TextChunk, Usage
from banyan.server.anthropic.translate import signature
from banyan.server.errors import Json
from banyan.server.openai.chat_completions import ChatChoice
from banyan.server.openai.chat_plan import ChatPlan
from banyan.server.openai.shapes import why_no_more

PING: Json = {"type": "ping"}

_REASONS: Mapping[str | None, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
}
_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"


class Blocks:
    """Content blocks as they are written, each closed before the next begins.

    Args:
        choice: names the calls.
        hides_thinking: blocks of thinking are empty but for their signature.
    """

    def __init__(self, choice: ChatChoice, hides_thinking: bool) -> None:
        self._choice = choice
        self._hides_thinking = hides_thinking
        self._open = ""
        self._index = -1
        self._space = ""
        """Blank text before a block of text, held until visible text follows."""
        self._hidden: list[str] = []

    def take(self, part: AnswerDelta) -> list[Json]:
        """The events of one part of the answer."""
        match part:
            case TextDelta(text):
                return self._said(text)
            case ReasoningDelta(text):
                begun = self._begin(_THINKING, {"thinking": "", "signature": ""})
                if self._hides_thinking:
                    self._hidden.append(text)
                    return begun
                return [*begun, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallStart(_, name, id):
                tool = {"id": self._choice.call_id(id), "name": name, "input": {}}
                return [*self.end(), *self._begin(_TOOL, tool)]
            case ToolCallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def end(self) -> list[Json]:
        """Close the open block, if any."""
        if not self._open:
            return []
        events: list[Json] = []
        if self._open == _THINKING:
            signed = signature("".join(self._hidden))
            events.append(self._delta({"type": "signature_delta", "signature": signed}))
        self._open, self._space, self._hidden = "", "", []
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _said(self, text: str) -> list[Json]:
        if self._open != _TEXT and not text.strip():
            self._space += text
            return []
        text, self._space = self._space + text, ""
        begun = self._begin(_TEXT, {"text": "", "citations": None})
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _begin(self, kind: str, empty: Json) -> list[Json]:
        """Open a block of this kind, unless one is open."""
        if self._open == kind:
            return []
        ended = self.end()
        self._open, self._space = kind, ""
        self._index += 1
        block = {"type": kind, **empty}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, start]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessageAnswer:
    """The bodies of one request's answer.

    Args:
        max_tokens: as the client asked; the plan may hold less, where the context is shorter.
        with_cache: report cached prompt tokens (--enable-cache-report).
    """

    def __init__(
        self,
        plan: ChatPlan,
        id: str,
        model: str,
        max_tokens: int,
        hides_thinking: bool,
        with_cache: bool,
    ) -> None:
        self._choice = ChatChoice(plan)
        self._blocks = Blocks(self._choice, hides_thinking)
        self._id = id
        self._model = model
        self._is_shortened = plan.asked[0].sampling.max_new_tokens < max_tokens
        self._with_cache = with_cache

    def whole(self, chunks: list[TextChunk]) -> Json:
        """The whole message of all chunks."""
        parts = merge_deltas([part for chunk in chunks for part in self._choice.read(chunk)])
        events = [event for part in parts for event in self._blocks.take(part)]
        last = self._end(chunks[-1])
        return {
            **self._head(chunks[-1].usage),
            "content": _content([*events, *self._blocks.end()]),
            **cast(Json, last["delta"]),
            "usage": self._usage(chunks[-1].usage),
        }

    def first(self, chunk: TextChunk) -> list[Json]:
        """The events before any content."""
        return [{"type": "message_start", "message": self._head(chunk.usage)}, PING]

    def events(self, chunk: TextChunk) -> list[Json]:
        """The events of one chunk, with the end of the message."""
        found = [e for part in self._choice.read(chunk) for e in self._blocks.take(part)]
        if chunk.finish is None:
            return found
        return [*found, *self._blocks.end(), self._end(chunk), {"type": "message_stop"}]

    def _end(self, chunk: TextChunk) -> Json:
        reason, sequence = self._stop(chunk.finish)
        return {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(chunk.usage),
        }

    def _stop(self, finish: Finish | None) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        matched = finish.matched if finish else None
        if isinstance(matched, str):
            return "stop_sequence", matched
        reason = self._choice.reason(finish)
        if reason not in _REASONS:
            raise RequestError("the request was aborted", status=500, code="aborted")
        if reason == "length" and self._is_shortened:
            return "model_context_window_exceeded", None
        return _REASONS[reason], None

    def _head(self, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        """Counts so far; input_tokens without cached ones, if these are reported."""
        cached = usage.cached_tokens if self._with_cache else None
        thinking = self._choice.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens - (cached or 0),
            "cache_creation_input_tokens": None if cached is None else 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"thinking_tokens": thinking} if thinking else None,
            **(why_no_more(usage) if self._with_cache else {}),
        }


def _content(events: list[Json]) -> list[Json]:
    """The content blocks of these events."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(cast(Json, event["content_block"])))
        elif event["type"] == "content_block_delta":
            for name, value in cast(Json, event["delta"]).items():
                if name == "partial_json":
                    blocks[-1]["input"] = _arguments(cast(str, value))
                elif name != "type":
                    blocks[-1][name] = value
    return blocks


def _arguments(text: str) -> Json:
    """The arguments of a call; {} for a call that was cut off."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
