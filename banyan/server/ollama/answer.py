"""Ollama's answers, whole or line by line. A tool call is sent when it is complete."""

import time
from datetime import UTC, datetime
from typing import cast

import orjson

from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from banyan.requests.generation import TextChunk
from banyan.server.errors import Json
from banyan.server.openai.chat_completions import ChatChoice
from banyan.server.openai.chat_plan import ChatPlan
from banyan.server.openai.shapes import chat_logprobs, why_no_more
from banyan.server.state import Service


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """The bodies of one request's answer.

    Args:
        is_chat: the text is in `message`, otherwise in `response`.
        started_ns: when the request came, by time.monotonic_ns.
        with_cache: report cached prompt tokens, and why there were no more (--enable-cache-report).
    """

    def __init__(
        self,
        service: Service,
        plan: ChatPlan,
        model: str,
        is_chat: bool,
        started_ns: int,
        with_cache: bool,
    ) -> None:
        self._with_cache = with_cache
        self._service = service
        self._choice = ChatChoice(plan)
        self._top = plan.top
        self._model = model
        self._is_chat = is_chat
        self._started_ns = started_ns
        self._planned_ns = time.monotonic_ns()
        self._first_ns = 0
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        """Calls that were not sent yet; the last may be incomplete."""

    def whole(self, chunks: list[TextChunk]) -> Json:
        """The whole answer of all chunks."""
        parts = [part for chunk in chunks for part in self._choice.read(chunk)]
        body = self._body(parts, is_last=True)
        scores = [score for chunk in chunks for score in chunk.output_scores]
        if self._top is not None:
            body["logprobs"] = chat_logprobs(self._service.required_tokenizer(), scores, self._top)[
                "content"
            ]
        return {**body, **self._end(chunks[-1])}

    def arrived(self) -> None:
        """Count a chunk; the first ends the evaluation of the prompt."""
        self._first_ns = self._first_ns or time.monotonic_ns()

    def lines(self, chunk: TextChunk) -> list[Json]:
        """The lines of one chunk; the last line of the answer has no text."""
        is_last = chunk.finish is not None
        parts = self._choice.read(chunk)
        body = self._body(parts, is_last)
        has_scores = self._top is not None and bool(chunk.output_scores)
        if has_scores:
            scores = chat_logprobs(
                self._service.required_tokenizer(), chunk.output_scores, self._top or 0
            )
            body["logprobs"] = scores["content"]
        found = [{**body, "done": False}] if has_scores or self._has_content(body) else []
        return [*found, {**self._body([], False), **self._end(chunk)}] if is_last else found

    def _has_content(self, body: Json) -> bool:
        inner = cast(Json, body["message"]) if self._is_chat else body
        return any(inner.get(key) for key in ("content", "response", "thinking", "tool_calls"))

    def _body(self, parts: list[AnswerDelta], is_last: bool) -> Json:
        said = "".join(p.text for p in parts if isinstance(p, TextDelta))
        thought = "".join(p.text for p in parts if isinstance(p, ReasoningDelta))
        inner: Json = {"content" if self._is_chat else "response": said}
        if thought:
            inner["thinking"] = thought
        if calls := self._complete(parts, is_last):
            inner["tool_calls"] = calls
        head: Json = {"model": self._model, "created_at": now()}
        if not self._is_chat:
            return {**head, **inner}
        return {**head, "message": {"role": "assistant", **inner}}

    def _complete(self, parts: list[AnswerDelta], is_last: bool) -> list[Json]:
        """Calls that these parts complete. A call that was cut off is dropped."""
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._calls.append((part, []))
            elif isinstance(part, ToolCallArguments):
                self._calls[-1][1].append(part.text)
        num_done = len(self._calls) if is_last else max(0, len(self._calls) - 1)
        done, self._calls = self._calls[:num_done], self._calls[num_done:]
        found = []
        for index, (start, texts) in enumerate(done):
            arguments = _arguments("".join(texts))
            if arguments is not None:
                function = {"index": index, "name": start.name, "arguments": arguments}
                found.append({"id": self._choice.call_id(start.id), "function": function})
        return found

    def _end(self, chunk: TextChunk) -> Json:
        """Fields of the last line: reason of the end, counts, durations in nanoseconds."""
        end_ns = time.monotonic_ns()
        first_ns = self._first_ns or end_ns
        usage = chunk.usage
        cached: Json = {"cached_tokens": usage.cached_tokens, **why_no_more(usage)}
        return {
            "done": True,
            "done_reason": chunk.finish.reason if chunk.finish else None,
            "total_duration": end_ns - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first_ns - self._planned_ns,
            "eval_count": usage.output_tokens,
            "eval_duration": end_ns - first_ns,
            **(cached if self._with_cache else {}),
        }


def _arguments(text: str) -> Json | None:
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
