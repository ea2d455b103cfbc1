"""A response as it becomes: its body at any moment, and the numbered events on the way.

A whole response is what its events add up to. Source: the public reference of the Responses API.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from banyan.requests.generation import TextChunk, Usage, cache_miss
from banyan.server.errors import Json
from banyan.server.openai.chat_completions import ChatChoice
from banyan.server.openai.chat_plan import ChatPlan
from banyan.server.openai.custom_tools import INPUT
from banyan.server.openai.shapes import chat_logprobs
from banyan.server.responses.tools import Offered, Shown, shown_tools
from banyan.server.responses.translate import ResponsesRequest, new_id
from banyan.server.state import Service
from banyan.server.tool_servers.base import ServerTool, ToolOutcome


@dataclass(frozen=True)
class _Counts:
    """Token counts: input, cached input, output, reasoning output."""

    input: int = 0
    cached: int = 0
    output: int = 0
    thinking: int = 0
    missed: tuple[Usage, ...] = ()
    """Reasons why more of the prompts was not cached."""


class ResponseAnswer:
    """The body of one response as it becomes, and the events on the way.

    The model writes it in one turn, or in several when tool servers answer its calls in between.

    Args:
        listings: tool servers whose tools the response lists.
        with_cache: report cached prompt tokens (--enable-cache-report).
    """

    def __init__(
        self,
        service: Service,
        plan: ChatPlan,
        request: ResponsesRequest,
        offered: Offered,
        listings: Sequence[Shown],
        id: str,
        model: str,
        with_cache: bool,
    ) -> None:
        self._service = service
        self._plan = plan
        self._choice = ChatChoice(plan)
        self.output = Output(offered.labels, offered.custom)
        self._listings = listings
        self._with_cache = with_cache
        self._usage: Usage | None = None
        """Of this turn."""
        self._past = _Counts()
        self._turn_start = 0
        self._num_events = 0
        self._end: Json = {"error": None, "incomplete_details": None, "completed_at": None}
        self._status = "queued" if request.background else "in_progress"
        self._fixed = _fixed(plan, request, id, model)

    @property
    def is_over(self) -> bool:
        return self._status not in ("queued", "in_progress")

    @property
    def has_begun(self) -> bool:
        return self._num_events > 0

    @property
    def needs_client(self) -> bool:
        """Whether the turn also called a function of the client."""
        turn = self.output.items[self._turn_start :]
        return any(item["type"] in (_CALL, _CUSTOM_CALL) for item in turn)

    @property
    def output_tokens(self) -> int:
        return self._counted().output

    def body(self) -> Json:
        """The response as it is at this moment."""
        return {
            **self._fixed,
            **self._end,
            "status": self._status,
            "output": self.output.so_far(),
            "usage": self._usage_body(),
        }

    def begin(self) -> list[Json]:
        """The events before any output."""
        created = self._event({"type": "response.created", "response": self.body()})
        self._status = "in_progress"
        found = [{"type": "response.in_progress", "response": self.body()}]
        for shown in self._listings:
            found += self.output.list_tools(shown.label, shown.tools)
        return [created, *map(self._event, found)]

    def turn(self, plan: ChatPlan) -> None:
        """Start the next turn, with the results of the calls."""
        self._past, self._usage = self._counted(), None
        self._turn_start = len(self.output.items)
        self._plan, self._choice = plan, ChatChoice(plan)

    def events(self, chunk: TextChunk) -> list[Json]:
        """The events of one chunk, with the end of the response."""
        scores = self._logprobs(chunk)
        found: list[Json] = []
        for part in self._choice.read(chunk):
            call_id = self._choice.call_id(part.id) if isinstance(part, ToolCallStart) else ""
            found += self.output.take(part, call_id, scores)
            scores = [] if isinstance(part, TextDelta) else scores
        self._usage = chunk.usage
        if chunk.finish is not None:
            reason = self._choice.reason(chunk.finish)
            if reason == "tool_calls":
                found += self.output.close()
            if reason != "tool_calls" or not self.output.waiting:
                found += self._over(reason)
        return [self._event(event) for event in found]

    def answered(self, index: int, outcome: ToolOutcome) -> list[Json]:
        """The events of a call after its tool server returned."""
        return [self._event(event) for event in self.output.answer_call(index, outcome)]

    def end(self, reason: str) -> list[Json]:
        """The events that end a response between two turns: "stop" or "length"."""
        return [self._event(event) for event in self._over(reason)]

    def fail(self, error: RequestError) -> list[Json]:
        """The events that end a failed response."""
        code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
        code = "invalid_prompt" if error.status < 429 else code
        return [self._event(event) for event in self._fail(code, str(error))]

    def cancel(self) -> None:
        """End the response as cancelled, with its output so far."""
        self.output.give_up()
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
        whole = self._status == "completed"
        closed = self.output.close() if whole else self.output.give_up()
        return [*closed, {"type": f"response.{self._status}", "response": self.body()}]

    def _fail(self, code: str, message: str) -> list[Json]:
        closed = self.output.give_up()
        self._status = "failed"
        self._end["error"] = {"code": code, "message": message}
        return [*closed, {"type": "response.failed", "response": self.body()}]

    def _event(self, event: Json) -> Json:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _logprobs(self, chunk: TextChunk) -> list[Json]:
        if self._plan.top is None or not chunk.output_scores:
            return []
        tokenizer = self._service.required_tokenizer()
        found = chat_logprobs(tokenizer, chunk.output_scores, self._plan.top)["content"]
        assert isinstance(found, list)
        return found

    def _counted(self) -> "_Counts":
        """Tokens of all turns so far."""
        past, usage = self._past, self._usage
        if usage is None:
            return past
        return _Counts(
            past.input + usage.prompt_tokens,
            past.cached + usage.cached_tokens,
            past.output + usage.output_tokens,
            past.thinking + self._choice.reasoning_tokens,
            (*past.missed, usage) if usage.cache_miss else past.missed,
        )

    def _usage_body(self) -> Json | None:
        counts = self._counted()
        if not counts.input:
            return None
        cached = counts.cached if self._with_cache else 0
        why = cache_miss(counts.missed) if self._with_cache else {}
        return {
            "input_tokens": counts.input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0, **why},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.thinking},
            "total_tokens": counts.input + counts.output,
        }


def _fixed(plan: ChatPlan, request: ResponsesRequest, id: str, model: str) -> Json:
    """The fields that stay the same during the response."""
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
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice,
        "tools": shown_tools(request.tools or []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


_MESSAGE, _REASONING = "message", "reasoning"
_CALL, _SERVER_CALL = "function_call", "mcp_call"
_CUSTOM_CALL = "custom_tool_call"
_CALLS = (_CALL, _SERVER_CALL, _CUSTOM_CALL)
_EVENTS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
    _SERVER_CALL: "response.mcp_call_arguments",
    _CUSTOM_CALL: "response.custom_tool_call_input",
}


def given_to(kind: str) -> str:
    """The member with what a call gives its tool."""
    return INPUT if kind == _CUSTOM_CALL else "arguments"


@dataclass
class OpenItem:
    """The open output item."""

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
        if self.kind in _CALLS:
            return {**item, given_to(self.kind): "".join(self.texts)}
        return {**item, "content": [self.part()]}


class Output:
    """Output items as they are written, each closed before the next begins.

    Args:
        labels: label of the tool server for each of its tools; the rest are the client's.
        custom: names of the tools that take a text.
    """

    def __init__(self, labels: Mapping[str, str], custom: frozenset[str]) -> None:
        self.items: list[Json] = []
        """Closed items."""
        self.waiting: list[int] = []
        """Calls among them that wait for a tool server."""
        self._labels = labels
        self._custom = custom
        self._open: OpenItem | None = None
        self._space = ""
        """Blank text before a message, held until visible text follows."""

    def take(self, part: AnswerDelta, call_id: str, logprobs: list[Json]) -> list[Json]:
        """The events of one part of the answer, without sequence numbers.

        Args:
            call_id: of a call that begins with this part.
        """
        match part:
            case TextDelta(text):
                return self._said(text, logprobs)
            case ReasoningDelta(text):
                return [*self._begin(_REASONING, {"summary": []}), *self._delta(text, [])]
            case ToolCallStart(_, name, _):
                return [*self.close(), *self._begin_call(name, call_id)]
            case ToolCallArguments(_, text):
                return self._delta(text, [])

    def list_tools(self, label: str, tools: Sequence[ServerTool]) -> list[Json]:
        """Events of the item that lists the tools of a server."""
        shown = [
            {"name": t.name, "description": t.description, "input_schema": t.schema}
            | {"annotations": t.annotations}
            for t in tools
        ]
        kind = "mcp_list_tools"
        item = {"type": kind, "id": new_id(kind), "server_label": label, "error": None}
        index = len(self.items)
        at = {"item_id": item["id"], "output_index": index}
        self.items.append({**item, "tools": shown})
        return [
            _item_event("added", index, {**item, "tools": []}),
            {"type": "response.mcp_list_tools.in_progress", **at},
            {"type": "response.mcp_list_tools.completed", **at},
            _item_event("done", index, self.items[index]),
        ]

    def answer_call(self, index: int, outcome: ToolOutcome) -> list[Json]:
        """Events of a call after its tool server returned."""
        self.waiting.remove(index)
        status = "failed" if outcome.error else "completed"
        item = self.items[index]
        item |= {"status": status, "error": outcome.error}
        item["output"] = None if outcome.error else outcome.output
        at = {"item_id": item["id"], "output_index": index}
        return [{"type": f"response.mcp_call.{status}", **at}, _item_event("done", index, item)]

    def close(self, status: str = "completed") -> list[Json]:
        """Close the item that is open, if one is. A call of a tool server waits for its answer."""
        item, self._open, self._space = self._open, None, ""
        if item is None:
            return []
        index = len(self.items)
        at = {"item_id": item.head["id"], "output_index": index}
        whole = item.whole(status)
        name = f"{_EVENTS[item.kind]}.done"
        if item.kind in _CALLS:
            own = {"name": item.head["name"]} if item.kind == _CALL else {}
            given = given_to(item.kind)
            events = [{"type": name, **at, **own, given: whole[given]}]
        else:
            part = item.part()
            inside = {**at, "content_index": 0}
            scores = {"logprobs": item.logprobs} if item.kind == _MESSAGE else {}
            events = [
                {"type": name, **inside, "text": part["text"], **scores},
                {"type": "response.content_part.done", **inside, "part": part},
            ]
        self.items.append(whole)
        if item.kind == _SERVER_CALL and status == "completed":
            whole["status"] = "calling"
            self.waiting.append(index)
            return events
        return [*events, _item_event("done", index, whole)]

    def give_up(self) -> list[Json]:
        """Close everything as incomplete."""
        closed = self.close("incomplete")
        for index in self.waiting:
            self.items[index]["status"] = "incomplete"
            closed.append(_item_event("done", index, self.items[index]))
        self.waiting.clear()
        return closed

    def calls(self) -> list[tuple[int, Json]]:
        """(index, item) of the calls that tool servers must answer before the next turn."""
        return [(index, self.items[index]) for index in self.waiting]

    def so_far(self) -> list[Json]:
        """The closed items, and the open one so far."""
        closed = [dict(item) for item in self.items]
        return [*closed, *([self._open.whole("in_progress")] if self._open else [])]

    def _said(self, text: str, logprobs: list[Json]) -> list[Json]:
        is_open = self._open is not None and self._open.kind == _MESSAGE
        if not is_open and not text.strip():
            self._space += text
            return []
        text, self._space = self._space + text, ""
        return [*self._begin(_MESSAGE, {"role": "assistant"}), *self._delta(text, logprobs)]

    def _begin_call(self, name: str, call_id: str) -> list[Json]:
        if name in self._custom:
            return self._begin(_CUSTOM_CALL, {"call_id": call_id, "name": name})
        if name not in self._labels:
            return self._begin(_CALL, {"call_id": call_id, "name": name})
        empty = {"output": None, "error": None, "approval_request_id": None}
        return self._begin(
            _SERVER_CALL, {"server_label": self._labels[name], "name": name, **empty}
        )

    def _begin(self, kind: str, head: Json) -> list[Json]:
        """Open an item of this kind, unless one is open."""
        if self._open is not None and self._open.kind == kind and kind not in _CALLS:
            return []
        space = self._space
        ended = self.close()
        self._space = space
        item = OpenItem(kind, {"type": kind, "id": new_id(kind), **head})
        self._open = item
        empty = {given_to(kind): ""} if kind in _CALLS else {"content": []}
        index = len(self.items)
        at = {"item_id": item.head["id"], "output_index": index}
        shown = {**item.head, "status": "in_progress", **empty}
        events = [*ended, _item_event("added", index, shown)]
        if kind == _SERVER_CALL:
            events.append({"type": "response.mcp_call.in_progress", **at})
        elif kind not in _CALLS:
            added = {"type": "response.content_part.added", **at, "content_index": 0}
            events.append({**added, "part": item.part()})
        return events

    def _delta(self, text: str, logprobs: list[Json]) -> list[Json]:
        item = self._open
        assert item is not None
        item.texts.append(text)
        at = {"item_id": item.head["id"], "output_index": len(self.items), "delta": text}
        name = f"{_EVENTS[item.kind]}.delta"
        if item.kind in _CALLS:
            return [{"type": name, **at}] if text else []
        item.logprobs += logprobs
        scores = {"logprobs": logprobs} if item.kind == _MESSAGE else {}
        return [{"type": name, **at, "content_index": 0, **scores}]


def _item_event(kind: str, index: int, item: Json) -> Json:
    return {"type": f"response.output_item.{kind}", "output_index": index, "item": dict(item)}
