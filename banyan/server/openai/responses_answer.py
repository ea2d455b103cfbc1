"""Shapes of a response: its output items one after another, as events, and whole.

A whole response is what its events add up to. Source: the public reference of the Responses API.
"""

import time
from dataclasses import dataclass, field

from banyan.base.errors import RequestError
from banyan.frontend.generation import TextChunk, Usage
from banyan.frontend.tools.parts import CallArguments, CallStart, Part, Said, Thought
from banyan.server.errors import Json
from banyan.server.openai.chat_answer import Choice
from banyan.server.openai.chat_plan import ChatPlan
from banyan.server.openai.responses_items import new_id
from banyan.server.openai.responses_request import ResponsesRequest
from banyan.server.openai.shapes import chat_logprobs
from banyan.server.state import Service

_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_TEXT_EVENTS = {_MESSAGE: "response.output_text", _REASONING: "response.reasoning_text"}


@dataclass
class OpenItem:
    """The output item that is being written."""

    kind: str
    head: Json
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def part(self) -> Json:
        """The one part of a message or of reasoning."""
        text = "".join(self.texts)
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        parts = {"type": "output_text", "text": text, "annotations": []}
        return {**parts, "logprobs": list(self.logprobs)}

    def whole(self, status: str) -> Json:
        item = {**self.head, "status": status}
        if self.kind == _CALL:
            return {**item, "arguments": "".join(self.texts)}
        return {**item, "content": [self.part()]}


class Output:
    """Output items as they are written, each closed before the next begins."""

    def __init__(self, choice: Choice) -> None:
        self.items: list[Json] = []
        """Items that are closed."""
        self._choice = choice
        self._open: OpenItem | None = None
        self._space = ""
        """Blank text that has come before a message: kept back until words follow."""

    def take(self, part: Part, logprobs: list[Json]) -> list[Json]:
        """Events that a part of the answer becomes, without their sequence numbers."""
        match part:
            case Said(text):
                return self._said(text, logprobs)
            case Thought(text):
                return [*self._begin(_REASONING, {"summary": []}), *self._delta(text, [])]
            case CallStart(_, name, id):
                head = {"call_id": self._choice.call_id(id), "name": name}
                return [*self.close(), *self._begin(_CALL, head)]
            case CallArguments(_, text):
                return self._delta(text, [])

    def close(self, status: str = "completed") -> list[Json]:
        """Close the item that is open, if one is."""
        item, self._open, self._space = self._open, None, ""
        if item is None:
            return []
        at = {"item_id": item.head["id"], "output_index": len(self.items)}
        whole = item.whole(status)
        if item.kind == _CALL:
            end = {"name": item.head["name"], "arguments": whole["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **at, **end}]
        else:
            part = item.part()
            inside = {**at, "content_index": 0}
            scores = {"logprobs": item.logprobs} if item.kind == _MESSAGE else {}
            done = {"type": f"{_TEXT_EVENTS[item.kind]}.done", **inside, "text": part["text"]}
            events = [
                {**done, **scores},
                {"type": "response.content_part.done", **inside, "part": part},
            ]
        done = {"type": "response.output_item.done", "output_index": len(self.items), "item": whole}
        self.items.append(whole)
        return [*events, done]

    def so_far(self) -> list[Json]:
        """The closed items, and the open one as far as it goes."""
        return [*self.items, *([self._open.whole("in_progress")] if self._open else [])]

    def _said(self, text: str, logprobs: list[Json]) -> list[Json]:
        is_open = self._open is not None and self._open.kind == _MESSAGE
        if not is_open and not text.strip():
            self._space += text
            return []
        text, self._space = self._space + text, ""
        return [*self._begin(_MESSAGE, {"role": "assistant"}), *self._delta(text, logprobs)]

    def _begin(self, kind: str, head: Json) -> list[Json]:
        """Open an item of this kind, unless one is open."""
        if self._open is not None and self._open.kind == kind and kind != _CALL:
            return []
        space = self._space
        ended = self.close()
        self._space = space
        item = OpenItem(kind, {"type": kind, "id": new_id(kind), **head})
        self._open = item
        empty = {"arguments": ""} if kind == _CALL else {"content": []}
        shown = {**item.head, "status": "in_progress", **empty}
        index = len(self.items)
        events = [{"type": "response.output_item.added", "output_index": index, "item": shown}]
        if kind != _CALL:
            at = {"item_id": item.head["id"], "output_index": index, "content_index": 0}
            events.append({"type": "response.content_part.added", **at, "part": item.part()})
        return [*ended, *events]

    def _delta(self, text: str, logprobs: list[Json]) -> list[Json]:
        item = self._open
        assert item is not None
        item.texts.append(text)
        at = {"item_id": item.head["id"], "output_index": len(self.items), "delta": text}
        if item.kind == _CALL:
            return [{"type": "response.function_call_arguments.delta", **at}] if text else []
        item.logprobs += logprobs
        scores = {"logprobs": logprobs} if item.kind == _MESSAGE else {}
        return [{"type": f"{_TEXT_EVENTS[item.kind]}.delta", **at, "content_index": 0, **scores}]


class ResponseAnswer:
    """The body of one response as it becomes, and the events on the way.

    Args:
        with_cache: report cached prompt tokens (--enable-cache-report).
    """

    def __init__(
        self,
        service: Service,
        plan: ChatPlan,
        request: ResponsesRequest,
        id: str,
        model: str,
        with_cache: bool,
    ) -> None:
        self._service = service
        self._plan = plan
        self._choice = Choice(plan)
        self._output = Output(self._choice)
        self._with_cache = with_cache
        self._usage: Usage | None = None
        self._num_events = 0
        self._end: Json = {"error": None, "incomplete_details": None, "completed_at": None}
        self._status = "queued" if request.background else "in_progress"
        self._fixed = _fixed(plan, request, id, model)

    def body(self) -> Json:
        """The response as it is at this moment."""
        return {
            **self._fixed,
            **self._end,
            "status": self._status,
            "output": self._output.so_far(),
            "usage": self._counts(),
        }

    def begin(self) -> list[Json]:
        """The events before any output."""
        created = self._event({"type": "response.created", "response": self.body()})
        self._status = "in_progress"
        return [created, self._event({"type": "response.in_progress", "response": self.body()})]

    def events(self, chunk: TextChunk) -> list[Json]:
        """The events that a chunk becomes, the end of the response included."""
        scores = self._logprobs(chunk)
        found: list[Json] = []
        for part in self._choice.read(chunk):
            found += self._output.take(part, scores)
            scores = [] if isinstance(part, Said) else scores
        self._usage = chunk.usage
        if chunk.finish is not None:
            found += self._over(self._choice.reason(chunk.finish))
        return [self._event(event) for event in found]

    def fail(self, error: RequestError) -> list[Json]:
        """The events that end a response which could not be completed."""
        code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
        code = "invalid_prompt" if error.status < 429 else code
        return [self._event(event) for event in self._fail(code, str(error))]

    def cancel(self) -> None:
        """End it as cancelled, with what it has."""
        self._output.close("incomplete")
        self._status = "cancelled"

    def _over(self, reason: str | None) -> list[Json]:
        if reason == "abort":
            return self._fail("server_error", "The request was aborted.")
        if reason == "length":
            self._status = "incomplete"
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._status = "completed"
            self._end["completed_at"] = int(time.time())
        closed = self._output.close(self._status)
        return [*closed, {"type": f"response.{self._status}", "response": self.body()}]

    def _fail(self, code: str, message: str) -> list[Json]:
        closed = self._output.close("incomplete")
        self._status = "failed"
        self._end["error"] = {"code": code, "message": message}
        return [*closed, {"type": "response.failed", "response": self.body()}]

    def _event(self, event: Json) -> Json:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _logprobs(self, chunk: TextChunk) -> list[Json]:
        if self._plan.top is None or not chunk.output_scores:
            return []
        words = self._service.words()
        found = chat_logprobs(words, chunk.output_scores, self._plan.top)["content"]
        assert isinstance(found, list)
        return found

    def _counts(self) -> Json | None:
        usage = self._usage
        if usage is None:
            return None
        cached = usage.cached_tokens if self._with_cache else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


def _fixed(plan: ChatPlan, request: ResponsesRequest, id: str, model: str) -> Json:
    """What does not change while the response becomes."""
    sampling = plan.asked[0].sampling
    reasoning = request.reasoning
    form = request.text.format if request.text else None
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice,
        "tools": [{"parameters": None, "strict": False, **t} for t in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }
