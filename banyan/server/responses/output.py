"""The output items of a response as they are written, one after another, and their events.

Source: the public reference of the Responses API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from banyan.server.errors import Json
from banyan.server.responses.items import new_id
from banyan.server.tool_servers.base import ServerTool, ToolOutcome

_MESSAGE, _REASONING = "message", "reasoning"
_CALL, _SERVER_CALL = "function_call", "mcp_call"
_CALLS = (_CALL, _SERVER_CALL)
_EVENTS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
    _SERVER_CALL: "response.mcp_call_arguments",
}


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
            return {**item, "arguments": "".join(self.texts)}
        return {**item, "content": [self.part()]}


class Output:
    """Output items as they are written, each closed before the next begins.

    Args:
        labels: label of the tool server for each of its tools; the rest are the client's.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.items: list[Json] = []
        """Closed items."""
        self.waiting: list[int] = []
        """Calls among them that wait for a tool server."""
        self._labels = labels
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
            events = [{"type": name, **at, **own, "arguments": whole["arguments"]}]
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
        empty = {"arguments": ""} if kind in _CALLS else {"content": []}
        index = len(self.items)
        at = {"item_id": item.head["id"], "output_index": index}
        shown = {**item.head, "status": "in_progress", **empty}
        events = [*ended, _item_event("added", index, shown)]
        if kind == _SERVER_CALL:
            events.append({"type": "response.mcp_call.in_progress", **at})
        elif kind != _CALL:
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
