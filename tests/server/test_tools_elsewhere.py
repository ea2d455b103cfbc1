"""Tools that run on another server, or that need a model trained for them: the model is not shown
them, the answer says so, and a server with --strict-requests refuses them."""

from collections.abc import Iterator

import httpx
import pytest

from banyan.config.schema import ServerConfig
from tests.server.fakes import Site
from tests.server.talk import TEMPLATE, TOOLS, USER, service_with, tool

FUNCTION = {"type": "function", **TOOLS[0]["function"]}
RESPONSES_KINDS = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("namespace", "local_shell", "shell", "apply_patch", "computer_use_preview"),
    *("tool_search", "programmatic_tool_calling"),
)
ANTHROPIC_KINDS = (
    *("web_search_20250305", "web_fetch_20250910", "bash_20250124", "memory_20250818"),
    *("text_editor_20250728", "computer_20250124", "code_execution_20250825", "mcp_toolset"),
)
OTHERS = {
    "/v1/responses": [{"type": kind, "name": kind} for kind in RESPONSES_KINDS],
    "/v1/messages": [{"type": kind, "name": kind, "max_uses": 5} for kind in ANTHROPIC_KINDS],
    "/v1/chat/completions": [{"type": k, k: {"name": k}} for k in ("mcp", "web_search")],
    "/api/chat": [{"type": "web_search"}],
}
BODIES = {
    "/v1/responses": ({"input": "Hi"}, [FUNCTION]),
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 9, "messages": USER},
        [{"name": "get_weather", "input_schema": {"type": "object"}}],
    ),
    "/v1/chat/completions": ({"messages": USER}, TOOLS[:1]),
    "/api/chat": ({"model": "tiny", "messages": USER, "stream": False}, TOOLS[:1]),
}
CASES = [(path, other) for path, others in OTHERS.items() for other in others]


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    with Site(ServerConfig(strict_requests=True)).serving() as site:
        site.state.service = service_with(site, TEMPLATE, "hermes")
        with httpx.Client(base_url=site.url) as client:
            yield client


def prompt(site: Site) -> str:
    return site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("path", OTHERS)
def test_the_model_is_shown_the_functions_and_the_answer_names_the_others(
    site: Site, http: httpx.Client, path: str
) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes")
    body, functions = BODIES[path]
    assert http.post(path, json={**body, "tools": functions}).status_code == 200
    alone = prompt(site)
    assert "get_weather" in alone
    for other in OTHERS[path]:
        answer = http.post(path, json={**body, "tools": [other, *functions]})
        assert answer.status_code == 200, answer.text
        assert prompt(site) == alone
        assert f"tools[0].type '{other['type']}'" in answer.headers["x-banyan-warnings"]
        answer = http.post(path, json={**body, "tools": [other]})
        assert answer.status_code == 200 and "<tools>" not in prompt(site)


@pytest.mark.parametrize(("path", "other"), CASES, ids=str)
def test_a_strict_server_refuses_them(strict: httpx.Client, path: str, other: dict) -> None:
    body, functions = BODIES[path]
    plain = {name: value for name, value in other.items() if name != "max_uses"}
    answer = strict.post(path, json={**body, "tools": [*functions, plain]})
    assert answer.status_code == 400 and other["type"] in answer.text


def test_a_choice_among_them_cannot_be_forced(site: Site, http: httpx.Client) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes")
    tools = [{"type": "web_search"}]
    for choice in ("required", {"type": "web_search"}, {"type": "function", "name": "web_search"}):
        answer = http.post(
            "/v1/responses", json={"input": "Hi", "tools": tools, "tool_choice": choice}
        )
        assert answer.status_code == 400, choice


ALLOWED = [{"type": "function", "function": {"name": "search"}}]


def allowed(mode: str) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": ALLOWED}}


def test_a_choice_may_name_the_tools_that_may_be_called(site: Site, http: httpx.Client) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes")

    def grammar(path: str, body: dict[str, object], choice: object) -> str:
        answer = http.post(path, json={**body, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        return site.generator.asked[-1].message.grammar

    chat = {"messages": USER, "tools": TOOLS}
    path = "/v1/chat/completions"
    assert grammar(path, chat, allowed("auto")) == ""
    forced = grammar(path, chat, allowed("required"))
    assert "search" in forced and "get_weather" not in forced
    assert grammar(path, chat, "any") == grammar(path, chat, "required")
    functions = [{"type": "function", **one["function"]} for one in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "search"}]}
    assert grammar("/v1/responses", {"input": "Hi", "tools": functions}, choice) == forced


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": ALLOWED}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("nope")]}},
        {"type": "allowed_tools", "allowed_tools": 7},
    ],
)
def test_a_malformed_choice_is_refused(site: Site, http: httpx.Client, choice: object) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes")
    body = {"messages": USER, "tools": TOOLS, "tool_choice": choice}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
