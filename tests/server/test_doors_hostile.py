"""Whatever JSON a client sends to the translated APIs is understood or refused by name."""

import json

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import RequestError
from banyan.server.anthropic import translate as anthropic
from banyan.server.ollama import translate as ollama
from banyan.server.openai.prompts import checked_messages
from banyan.server.openai.schema import ChatRequest, typed
from tests.server.fakes import Site
from tests.server.talk import PATH

LEAVES = st.sampled_from(
    [None, True, False, 0, -1, 2000, 0.5, "", "x", "text", "thinking", "tool_use", "tool_result",
     "document", "auto", "any", "tool", "enabled", "disabled", "json_schema", "json", "banyan:?",
     "high", [], {}]
)  # fmt: skip
KEYS = st.sampled_from(
    ["type", "text", "content", "thinking", "signature", "id", "name", "input", "tool_use_id",
     "source", "data", "title", "is_error", "function", "arguments", "budget_tokens", "display",
     "effort", "format", "schema", "input_schema", "strict", "num_predict", "mirostat", "seed"]
)  # fmt: skip
SHALLOW = st.dictionaries(KEYS, LEAVES, max_size=4)
ANYTHING = LEAVES | SHALLOW | st.lists(SHALLOW, max_size=2) | st.dictionaries(KEYS, SHALLOW)
VALUES = LEAVES | SHALLOW | st.lists(SHALLOW, max_size=2)
BLOCK = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    st.sampled_from(
        ["text", "thinking", "tool_use", "tool_result", "document", "search_result", 1]
    ),
    st.dictionaries(KEYS, VALUES, max_size=4)
    | st.fixed_dictionaries(
        dict.fromkeys(("text", "thinking", "id", "name", "tool_use_id"), st.just("x")),
        optional={"content": VALUES, "input": VALUES, "signature": LEAVES, "source": SHALLOW},
    ),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]),
     "content": st.lists(BLOCK, max_size=3) | st.just("x")},
    optional={"tool_calls": st.lists(BLOCK, max_size=2), "thinking": LEAVES},
)  # fmt: skip


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, object]]:
    """Bodies that have what is required, and anything in one field besides."""
    names = [n for n in kind.__struct_fields__ if n not in ("model", "max_tokens", "messages")]
    body = st.fixed_dictionaries(
        {"model": st.just("x"), "max_tokens": st.just(9), "messages": st.lists(MESSAGE, max_size=3)}
    )
    other = st.tuples(st.sampled_from(names), ANYTHING)
    return st.builds(lambda fields, extra: {**fields, extra[0]: extra[1]}, body, other)


DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize("given", [{"x": 10**30}, DEEP], ids=["large number", "deep"])
def test_hostile_arguments_and_schemas_are_no_failure_of_the_server(
    site: Site, given: dict[str, object]
) -> None:
    used = {"type": "tool_use", "id": "1", "name": "f", "input": given}
    user = {"role": "user", "content": "Hi"}
    call = {"function": {"name": "f", "arguments": given}}
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": given}}}
    function = {"name": "f", "parameters": tool["input_schema"]}
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [used]}, user]}),
        ("/v1/messages", {"messages": [user], "tools": [tool]}),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [call]}, user]}),
        ("/api/chat", {"messages": [user], "tools": [{"type": "function", "function": function}]}),
        ("/api/chat", {"messages": [user], "format": given}),
        (PATH, {"messages": [user], "tools": [{"type": "function", "function": function}]}),
    ]
    for path, fields in bodies:
        body = {"model": "tiny", "max_tokens": 9, "stream": False, **fields}
        answer = httpx.post(site.url + path, json=body)
        assert answer.status_code in (200, 400), (path, fields.keys(), answer.text)


def report(field: str, why: str) -> None:
    assert field and why


@settings(max_examples=150, deadline=None)
@given(bodies(anthropic.MessagesRequest))
def test_any_body_of_the_messages_api_becomes_a_chat_request_or_a_refusal(
    body: dict[str, object],
) -> None:
    try:
        request = typed(body, anthropic.MessagesRequest)
        found = anthropic.chat_body(request, None, report)
        checked_messages(typed(found, ChatRequest).messages)
    except RequestError as error:
        assert error.status == 400 and str(error)


@settings(max_examples=150, deadline=None)
@given(bodies(ollama.OllamaChatRequest))
def test_any_body_of_ollama_s_chat_becomes_a_chat_request_or_a_refusal(
    body: dict[str, object],
) -> None:
    try:
        request = typed(body, ollama.OllamaChatRequest)
        checked_messages(typed(ollama.chat_body(request, report), ChatRequest).messages)
    except RequestError as error:
        assert error.status == 400 and str(error)


@settings(max_examples=150, deadline=None)
@given(bodies(ollama.GenerateRequest))
def test_any_body_of_ollama_s_prompts_becomes_a_chat_request_or_a_refusal(
    body: dict[str, object],
) -> None:
    try:
        request = typed(body, ollama.GenerateRequest)
        for found in (
            ollama.prompt_body(request, report),
            ollama.raw_body(request, [1], report),
        ):
            typed(found, ChatRequest)
    except RequestError as error:
        assert error.status == 400 and str(error)
