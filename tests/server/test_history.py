"""History that clients send back: answers of this server, cut or whole, on every route, and with
chat templates of every style."""

import json

import httpx
import pytest

from banyan.requests.generation import Finish
from tests.server.fakes import Site
from tests.server.talk import TOOLS, USER, says, service_with

HEAD = "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}"
MESSAGE = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
TAIL = "[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n"


def style(body: str) -> str:
    return f"{HEAD}{MESSAGE}{CALLS}{body}\n</tool_call>{{% endfor %}}{TAIL}"


NAMED = '{"name": "{{ c.function.name }}", "arguments": '
STYLES = {
    "iterates": style(
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "<{{ k }}>{{ v if v is string else v | tojson }}{% endfor %}"
    ),
    "dumps": style(NAMED + "{{ c.function.arguments | tojson }}}"),
    "prints": style(NAMED + "{{ c.function.arguments }}}"),
    "asks": style(
        NAMED + "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}}"
    ),
    "has no calls": f"{MESSAGE}{TAIL}",
}
OBJECTS = {
    "whole": ('{"city": "Oslo"}', {"city": "Oslo"}),
    "object": ({"city": "Oslo"}, {"city": "Oslo"}),
    "cut in a text": ('{"city": "Os', {"city": "Os"}),
    "cut in a key": ('{"city": "Oslo", "da', {"city": "Oslo"}),
    "cut in a list": ('{"days": [1, 2', {"days": [1]}),
    "cut at once": ("{", {}),
    "empty": ("", {}),
    "null": (None, {}),
    "null as text": ("null", {}),
    "twice encoded": ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
    "a list": ("[1]", {"arguments": [1]}),
    "no JSON": ("city=Oslo", {"arguments": "city=Oslo"}),
    "behind it more": ('{"city": 1} x', {"arguments": '{"city": 1} x'}),
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def model_with(site: Site, template: str) -> Site:
    site.state.service = service_with(site, template, "hermes", "qwen3")
    return site


def prompt(site: Site) -> str:
    """The text of the latest prompt."""
    return site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)


def shown(text: str, template: str) -> object:
    """The arguments of the call in a prompt, as this style writes them."""
    inner = text.split("<tool_call>\n")[-1].split("</tool_call>")[0].strip()
    if template != "iterates":
        return json.loads(inner)["arguments"]
    pairs = [pair.split(">") for pair in inner.removeprefix("get_weather").split("<")[1:]]
    return {name: json.loads(v) if v.startswith("[") else v for name, v in pairs}


def chat(arguments: object) -> tuple[str, dict[str, object]]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    return "/v1/chat/completions", {"messages": [*USER, said, result], "tools": TOOLS}


def responses(arguments: object) -> tuple[str, dict[str, object]]:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    items = [{"role": "user", "content": "Hi"}, {**call, "arguments": arguments}, result]
    return "/v1/responses", {"input": items}


def anthropic(arguments: object) -> tuple[str, dict[str, object]]:
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [*USER, *turns]}


def ollama(arguments: object) -> tuple[str, dict[str, object]]:
    call = {"function": {"name": "get_weather", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "rain", "tool_name": "get_weather"}
    return "/api/chat", {"model": "tiny", "messages": [*USER, said, result], "stream": False}


ROUTES = {"chat": chat, "responses": responses, "anthropic": anthropic, "ollama": ollama}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("template", STYLES)
def test_arguments_of_earlier_calls_become_an_object(
    site: Site, http: httpx.Client, route: str, template: str
) -> None:
    model_with(site, STYLES[template])
    for name, (arguments, wanted) in OBJECTS.items():
        path, body = ROUTES[route](arguments)
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (name, answer.text)
        text = prompt(site)
        assert shown(text, template) == wanted, (name, text)
        assert "rain" in text.rpartition("</tool_call>")[2]


@pytest.mark.parametrize("cut", [None, 30, 62, 70])
@pytest.mark.parametrize("template", STYLES)
def test_an_answer_is_accepted_when_it_is_sent_back(
    site: Site, http: httpx.Client, template: str, cut: int | None
) -> None:
    """As it was answered, with all its members, by each API."""
    model_with(site, STYLES[template])
    finish = Finish("length") if cut else None
    text = "<think>\nWhy?\n</think>\n\nSure. " + CALL
    says(site, text[: cut + 30] if cut else text, finish)
    message = http.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS}).json()
    said = message["choices"][0]["message"]
    answer = http.post("/v1/chat/completions", json={"messages": [*USER, said, *USER]})
    assert answer.status_code == 200 and "Sure." in prompt(site)

    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    body = {"model": "tiny", "max_tokens": 9, "tools": tools}
    content = http.post("/v1/messages", json={**body, "messages": USER}).json()["content"]
    turns = [*USER, {"role": "assistant", "content": content}, *USER]
    answer = http.post("/v1/messages", json={**body, "messages": turns})
    assert answer.status_code == 200 and "Sure." in prompt(site)

    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    output = http.post("/v1/responses", json={"input": "Hi", "tools": functions}).json()["output"]
    answer = http.post("/v1/responses", json={"input": [*output, *USER], "tools": functions})
    assert answer.status_code == 200 and "Sure." in prompt(site)

    body = {"model": "tiny", "tools": TOOLS, "stream": False}
    said = http.post("/api/chat", json={**body, "messages": USER}).json()["message"]
    answer = http.post("/api/chat", json={**body, "messages": [*USER, said, *USER]})
    assert answer.status_code == 200 and "Sure." in prompt(site)


@pytest.mark.parametrize("template", ["dumps", "prints", "asks", "has no calls"])
@pytest.mark.parametrize(
    ("arguments", "end"),
    [('{"city": "Os', '{"city": "Os'), ('{"city": "Oslo"}', '{"city": "Oslo"}')],
)
def test_a_continued_message_keeps_its_text_and_its_open_call(
    site: Site, http: httpx.Client, template: str, arguments: str, end: str
) -> None:
    model_with(site, STYLES[template])
    function = {"name": "get_weather", "arguments": arguments}
    last = {"role": "assistant", "content": "Sure.", "tool_calls": [{"function": function}]}
    body = {"messages": [*USER, last], "continue_final_message": True, "tools": TOOLS}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text = prompt(site)
    assert text.endswith(end) and "Sure." in text and "get_weather" in text.split("Sure.")[1]


@pytest.mark.parametrize("template", ["dumps", "prints", "asks", "has no calls"])
@pytest.mark.parametrize("given", [{"city": "Oslo"}, {}, None], ids=str)
def test_a_history_of_messages_may_end_with_a_call(
    site: Site, http: httpx.Client, template: str, given: object
) -> None:
    """As an answer that was cut behind it is sent back to be continued."""
    model_with(site, STYLES[template])
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": given}
    last = {"role": "assistant", "content": [{"type": "text", "text": "Sure."}, use]}
    body = {"model": "tiny", "max_tokens": 9, "messages": [*USER, last]}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    text = prompt(site).split("Sure.")[1]
    assert "get_weather" in text and ("Oslo" in text) == bool(given)


def test_a_continued_message_whose_calls_are_not_json_is_refused_in_words(
    site: Site, http: httpx.Client
) -> None:
    model_with(site, STYLES["iterates"])
    function = {"name": "get_weather", "arguments": "{}"}
    last = {"role": "assistant", "content": "Sure.", "tool_calls": [{"function": function}]}
    body = {"messages": [*USER, last], "continue_final_message": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("template", STYLES)
def test_a_continued_message_may_have_reasoning_alone(
    site: Site, http: httpx.Client, template: str
) -> None:
    model_with(site, STYLES[template])
    last = {"role": "assistant", "content": None, "reasoning_content": "Let me"}
    body = {"messages": [*USER, last], "continue_final_message": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert prompt(site).endswith("[assistant]Let me")


@pytest.mark.parametrize("role", ["tool", "system", "user", "assistant"])
def test_content_may_be_null_or_absent(site: Site, http: httpx.Client, role: str) -> None:
    model_with(site, STYLES["dumps"])
    for content in ({"content": None}, {}, {"content": []}):
        message = {"role": role, "tool_call_id": "call_1", **content}
        for turns in ([*USER, message], [message, *USER]):
            body = {"messages": turns}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert "None" not in prompt(site)


def test_parts_that_other_apis_write_are_shown(site: Site, http: httpx.Client) -> None:
    model_with(site, STYLES["dumps"])
    parts = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
        {"type": "refusal", "refusal": "I will not."},
        {"type": "text", "text": "Or will I?"},
        "Yes.",
    ]
    turns = [*USER, {"role": "assistant", "content": parts}, *USER]
    assert http.post("/v1/chat/completions", json={"messages": turns}).status_code == 200
    text = prompt(site)
    for words in ("Hm.\nSo.", "I will not.", "Or will I?", "Yes."):
        assert words in text


def test_items_of_tools_that_run_elsewhere_are_reported_and_left_out(
    site: Site, http: httpx.Client
) -> None:
    model_with(site, STYLES["dumps"])
    kinds = ("web_search_call", "local_shell_call", "local_shell_call_output", "compaction")
    items = [{"type": kind, "id": "x", "status": "completed"} for kind in kinds]
    custom = [
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "patched"},
    ]
    answer = http.post("/v1/responses", json={"input": [*USER, *items, *custom]})
    assert answer.status_code == 200, answer.text
    assert all(kind in answer.headers["x-banyan-warnings"] for kind in kinds)
    assert "*** Begin" in prompt(site) and "patched" in prompt(site)

    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found."},
    ]
    turns = [*USER, {"role": "assistant", "content": blocks}, *USER]
    body = {"model": "tiny", "max_tokens": 9, "messages": turns}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200 and "Found." in prompt(site)
    assert "server_tool_use" in answer.headers["x-banyan-warnings"]
