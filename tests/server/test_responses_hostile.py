"""Whatever JSON a client sends to /v1/responses is understood or refused by name."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import RequestError
from banyan.server.openai.prompts import checked_messages
from banyan.server.openai.schema import ChatRequest, account_for_members, typed
from banyan.server.responses.tools import first_listings, offered_tools, shown_tools
from banyan.server.responses.translate import (
    Reasoning,
    ResponsesRequest,
    TextForm,
    chat_body,
    given_items,
)
from banyan.server.tool_servers.base import ToolServers
from banyan.server.tool_servers.start import DemoServer
from tests.server.fakes import Site
from tests.server.test_doors_hostile import DEEP

PATH = "/v1/responses"
SERVERS = ToolServers({"demo": DemoServer()})

LEAVES = st.sampled_from(
    [None, True, 0, -1, 0.5, "", "x", "demo", "clock", "{}", "never", "always", "auto", "required",
     "user", "developer", "completed", "http://127.0.0.1/mcp", [], {}]
)  # fmt: skip
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "error",
     "summary", "encrypted_content", "server_label", "server_url", "tools", "status", "parameters",
     "allowed_tools", "tool_names", "read_only", "require_approval", "message", "format", "schema",
     "effort", "headers"]
)  # fmt: skip
SHALLOW = st.dictionaries(KEYS, LEAVES, max_size=4)
ANYTHING = LEAVES | SHALLOW | st.lists(LEAVES | SHALLOW, max_size=2)


def objects(*kinds: str, **members: object) -> st.SearchStrategy[dict[str, object]]:
    """Objects of a type, with members that fit or do not."""
    usual = st.just(members)
    extra = st.dictionaries(KEYS, ANYTHING, max_size=2)
    return st.builds(
        lambda kind, own, more: {**own, "type": kind, **more}, st.sampled_from(kinds), usual, extra
    )


PART = objects("input_text", "output_text", "refusal", "input_image", text="x", refusal="y")
ITEM = (
    st.builds(
        lambda item, parts: {**item, "content": parts},
        objects("message", role="user"),
        st.lists(PART, max_size=2) | LEAVES,
    )
    | objects("function_call", call_id="c", name="clock", arguments="{}")
    | objects("function_call_output", call_id="c", output="x")
    | objects("reasoning", summary=[{"type": "summary_text", "text": "hm"}])
    | objects("mcp_call", server_label="demo", name="clock", arguments="{}", output="x")
    | objects("mcp_list_tools", server_label="demo", tools=[])
    | objects("mcp_approval_request", "mcp_approval_response", "item_reference", "compaction")
)
TOOL = objects("mcp", server_label="demo", require_approval="never") | objects(
    "function", "custom", "web_search", name="f", parameters={"type": "object"}
)
FIELDS = [n for n in ResponsesRequest.__struct_fields__ if n not in ("model", "input", "tools")]
BODIES = st.builds(
    lambda body, other: {**body, other[0]: other[1]},
    st.fixed_dictionaries(
        {"input": st.lists(ITEM, min_size=1, max_size=3) | st.just("Hi")},
        optional={"tools": st.lists(TOOL, max_size=2)},
    ),
    st.tuples(st.sampled_from(FIELDS), ANYTHING),
)


def report(field: str, why: str) -> None:
    assert field and why


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_any_body_becomes_a_chat_request_or_a_refusal(body: dict[str, object]) -> None:
    try:
        account_for_members(body, {"reasoning": Reasoning, "text": TextForm}, (), report)
        request = typed(body, ResponsesRequest)
        items = given_items(request.input)
        offered = offered_tools(request.tools or [], SERVERS, report)
        found = chat_body(request, items, offered, None, report)
        checked_messages(typed(found, ChatRequest).messages)
        first_listings(offered, items)
        shown_tools(request.tools or [])
    except RequestError as error:
        assert error.status == 400 and str(error)


@pytest.mark.parametrize("given", [{"x": 10**30}, DEEP], ids=["large number", "deep"])
def test_hostile_values_are_no_failure_of_the_server(site: Site, given: object) -> None:
    call = {"type": "mcp_call", "server_label": "demo", "name": "clock", "arguments": "{}"}
    user = {"role": "user", "content": "Hi"}
    site.state.tool_servers = SERVERS
    bodies: list[dict[str, object]] = [
        {"input": [user, {**call, "error": {"content": given}}, user]},
        {"input": [user, {"type": "mcp_list_tools", "server_label": "demo", "tools": [given]}]},
        {"input": "Hi", "tools": [{"type": "mcp", "server_label": "demo", "allowed_tools": given}]},
        {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": given}]},
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": given}}},
        {"input": "Hi", "tool_choice": {"type": "mcp", "server_label": given}},
    ]
    for body in bodies:
        answer = httpx.post(site.url + PATH, json={"model": "tiny", **body})
        assert answer.status_code in (200, 400), (body.keys(), answer.text)
    site.state.tool_servers = ToolServers()
