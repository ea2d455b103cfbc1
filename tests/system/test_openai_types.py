"""Every answer and every chunk against the types of the official openai client, strictly."""

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from tests.system.serving import Server, stream_events

pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CHAT = {
    "messages": [{"role": "user", "content": "Name the capital of France."}],
    "temperature": 0,
    "max_tokens": 40,
}
PROMPT = {"prompt": "Water boils at", "temperature": 0, "max_tokens": 4}

CHATS: dict[str, dict] = {
    "plain": {},
    "cut": {"max_tokens": 2},
    "stopped": {"stop": ["Paris"]},
    "scored": {"logprobs": True, "top_logprobs": 2},
    "twice": {"n": 2, "seed": 5, "temperature": 1.0},
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named call": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": TOOL["function"]},
    },
    "schema": {"response_format": SCHEMA},
}
COMPLETIONS: dict[str, dict] = {
    "plain": {},
    "scored": {"logprobs": 2},
    "echoed": {"echo": True},
    "twice": {"n": 2, "seed": 5, "temperature": 1.0},
    "several": {"prompt": ["Water boils at", "One, two,"]},
}


def strictly(kind: type[BaseModel], body: dict) -> None:
    TypeAdapter(kind).validate_python(body, strict=True)


def whole(server: Server, route: str, body: dict) -> dict:
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: Server, route: str, body: dict) -> list[dict]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", route, json=asked) as response:
        assert response.status_code == 200
        return list(stream_events(response))


def in_order(found: list[dict], num_choices: int) -> dict:
    """Check what holds for the chunks of every stream; returns the usage, which comes last."""
    *said, last = found
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in said)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in found}) == 1
    ended: set[int] = set()
    for chunk in said:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended, "something follows the end of a choice"
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    assert ended == set(range(num_choices))
    return last["usage"]


def message_of(found: list[dict], index: int) -> tuple[str, list[dict]]:
    """The text and the calls that the deltas of a choice add up to."""
    text, calls, roles = "", [], []
    for choice in (c for chunk in found for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        roles.append(delta.get("role"))
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert roles[0] == "assistant" and not any(roles[1:])
    return text, calls


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_fits_the_types_and_its_chunks_add_up_to_it(demo_server: Server, case: str):
    body = CHAT | CHATS[case]
    answer = whole(demo_server, "/v1/chat/completions", body)
    strictly(ChatCompletion, answer)
    found = chunks(demo_server, "/v1/chat/completions", body)
    for chunk in found:
        strictly(ChatCompletionChunk, chunk)
    assert in_order(found, len(answer["choices"])) == answer["usage"]
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message["tool_calls"] or []]
        assert message_of(found, choice["index"]) == (message["content"] or "", calls)


@pytest.mark.parametrize("case", COMPLETIONS)
def test_a_completion_fits_the_types_and_its_chunks_add_up_to_it(demo_server: Server, case: str):
    body = PROMPT | COMPLETIONS[case]
    answer = whole(demo_server, "/v1/completions", body)
    strictly(Completion, answer)
    found = chunks(demo_server, "/v1/completions", body)
    usage = in_order(found, len(answer["choices"]))
    assert usage == answer["usage"]
    for choice in answer["choices"]:
        own = [c for x in found for c in x["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    for chunk in found:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in OpenAI's chunks
        strictly(Completion, chunk)


def test_usage_in_every_chunk_grows_to_the_whole(demo_server: Server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    with demo_server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        found = list(stream_events(response))
    for chunk in found:
        strictly(ChatCompletionChunk, chunk)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert (
        counts[-1] == whole(demo_server, "/v1/chat/completions", CHAT)["usage"]["completion_tokens"]
    )


def test_models_fit_the_types(demo_server: Server):
    listed = demo_server.http.get("/v1/models").json()
    for model in listed["data"]:
        strictly(Model, model)
        strictly(Model, demo_server.http.get(f"/v1/models/{model['id']}").json())
