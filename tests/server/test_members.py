"""No member of a field is ignored silently, and no spelling of structured output is answered with
free text."""

import json

import httpx
import pytest

from tests.server.fakes import Site
from tests.server.talk import TEMPLATE, TOOLS, USER, service_with, tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PARTS = [{"type": "text", "text": "Hi", "mood": "x"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA = "/v1/responses", "/api/chat"
BODIES = {
    CHAT: {"messages": USER},
    COMPLETION: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"model": "tiny", "max_tokens": 9, "messages": USER},
    OLLAMA: {"model": "tiny", "messages": USER, "stream": False},
    "/generate": {"text": "Hi"},
}
# (path, fields, the member that nothing reads)
UNREAD = [
    *[(p, {"stream_options": {"mood": 1}}, "stream_options.mood") for p in (CHAT, COMPLETION)],
    *[
        (p, {"response_format": {"type": "text", "mood": 1}}, "response_format.mood")
        for p in (CHAT, COMPLETION)
    ],
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "mood": 1}}},
        "response_format.json_schema.mood",
    ),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    (CHAT, {"messages": [{**USER[0], "mood": "x"}]}, "messages.mood"),
    (CHAT, {"messages": [{"role": "user", "content": PARTS}]}, "messages.content.mood"),
    (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{**CALL, "mood": 1}]}]},
        "messages.tool_calls.mood",
    ),
    (MESSAGES, {"messages": [{"role": "user", "content": PARTS}]}, "messages.content.mood"),
    (MESSAGES, {"system": PARTS}, "system.mood"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, "mood": 1}]}, "tools.mood"),
    (RESPONSES, {"input": [{"role": "user", "content": "x", "mood": 1}]}, "input.mood"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{**PARTS[0], "type": "input_text"}]}]},
        "input.content.mood",
    ),
    (RESPONSES, {"text": {"format": {"type": "text", "mood": 1}}}, "text.format.mood"),
    (OLLAMA, {"messages": [{**USER[0], "mood": 1}]}, "messages.mood"),
    (
        OLLAMA,
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{**CALL, "mood": 1}]}]},
        "messages.tool_calls.mood",
    ),
]


@pytest.mark.parametrize(("path", "fields", "member"), UNREAD)
def test_a_member_that_nothing_reads_is_reported(
    http: httpx.Client, path: str, fields: dict, member: str
) -> None:
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert f"{member}: " in answer.headers["x-banyan-warnings"]
    as_null = json.loads(json.dumps(fields).replace('"mood": 1', '"mood": null'))
    as_null = json.loads(json.dumps(as_null).replace('"mood": "x"', '"mood": null'))
    if as_null != fields:
        answer = http.post(path, json=BODIES[path] | as_null)
        assert member not in answer.headers.get("x-banyan-warnings", "")


def test_a_member_that_the_chat_template_reads_is_not_reported(
    site: Site, http: httpx.Client
) -> None:
    site.state.service = service_with(site, TEMPLATE.replace("m.role", "m.mood or m.role"))
    body = {"messages": [{**USER[0], "mood": "x"}], "tools": [tool("f", returns={"a": 1})]}
    answer = http.post(CHAT, json=body)
    assert "x-banyan-warnings" not in answer.headers
    picky = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    site.state.service = service_with(site, picky, "hermes")
    answer = http.post(CHAT, json={"messages": USER, "tools": body["tools"]})
    assert "tools.function.returns: " in answer.headers["x-banyan-warnings"]


AS_SCHEMA = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json", "value": SCHEMA}},
    {"json_schema": SCHEMA},
    {"guided_json": SCHEMA},
    {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}},
]
AS_REGEX = [
    {"regex": "[ab]+"},
    {"guided_regex": "[ab]+"},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"response_format": {"type": "regex", "pattern": "[ab]+"}},
]
AS_CHOICE = [{"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}]
AS_GRAMMAR = [
    {"ebnf": 'root ::= "a"'},
    {"guided_grammar": 'root ::= "a"'},
    {"grammar": 'root ::= "a"'},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
    {"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}},
]
AS_OBJECT = [
    {"response_format": {"type": "json_object"}},
    {"guided_json_object": True},
    {"structured_outputs": {"json_object": True}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("spellings", [AS_SCHEMA, AS_REGEX, AS_CHOICE, AS_GRAMMAR, AS_OBJECT])
def test_every_spelling_is_the_same_constraint(
    site: Site, http: httpx.Client, path: str, spellings: list[dict]
) -> None:
    grammars = set()
    for fields in spellings:
        answer = http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
        assert "x-banyan-warnings" not in answer.headers
        grammars.add(site.generator.asked[-1].message.grammar)
    assert len(grammars) == 1 and grammars != {""}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, OLLAMA, "/generate"])
@pytest.mark.parametrize(
    "spellings", [AS_SCHEMA, AS_REGEX, AS_CHOICE, AS_GRAMMAR, AS_OBJECT], ids=str
)
def test_a_route_that_does_not_read_a_spelling_refuses_it(
    http: httpx.Client, path: str, spellings: list[dict]
) -> None:
    for fields in spellings:
        answer = http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 400, (fields, answer.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        {"structured_outputs": "json"},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json_object": 1}},
        {"structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA},
        {"guided_json_object": "yes"},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "xml"}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_malformed_constraint_is_refused(http: httpx.Client, path: str, fields: dict) -> None:
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in fields


def test_tools_of_this_suite_have_no_other_members(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": USER, "tools": TOOLS})
    assert "function." not in answer.headers.get("x-banyan-warnings", "")
