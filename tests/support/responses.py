"""Requests to the Responses API, and its events."""

import json

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'

ARGUMENTS = '{"city": "Oslo"}'


def ask(http: httpx.Client, **fields: object) -> dict:
    """A whole response, checked."""
    answer = http.post(PATH, json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    Response.model_validate_json(answer.content, strict=True)
    return answer.json()


def events(http: httpx.Client, **fields: object) -> list[dict]:
    """The events of a stream, checked: types, names, numbers, and what they add up to."""
    answer = http.post(PATH, json={"input": "Hi", "stream": True, **fields})
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    return checked(answer.text)


def checked(text: str, start: int = 0) -> list[dict]:
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    found = []
    for block in blocks[:-2]:
        name, _, rest = block.partition("\n")
        EVENT.validate_json(rest.removeprefix("data: "), strict=True)
        event = json.loads(rest.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [e["sequence_number"] for e in found] == list(range(start, start + len(found)))
    return found


def kinds(found: list[dict]) -> list[str]:
    """Types of events in order, repeated deltas once."""
    names = [e["type"].removeprefix("response.") for e in found]
    return [n for i, n in enumerate(names) if i == 0 or n != names[i - 1]]


def without_ids(items: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


MESSAGE = [
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
]
THINKING = [
    *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
    *("content_part.done", "output_item.done"),
]
CALLING = [
    *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
    "output_item.done",
]
