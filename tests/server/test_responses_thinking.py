"""/v1/responses of models that think: reasoning items and their events, beside calls and structure,
for each way in which models mark their thinking; strictly by the official client's types."""

import json
from dataclasses import dataclass

import httpx
import openai
import pytest

from banyan.messages.requests import Constraint
from banyan.requests.generation import Finish
from banyan.server.tool_servers.base import ToolServers
from banyan.server.tool_servers.start import DemoServer
from tests.server.fakes import Site, steps
from tests.server.talk import TEMPLATE, says, service_with
from tests.support.responses import (
    ARGUMENTS,
    CALL,
    CALLING,
    MESSAGE,
    PATH,
    THINKING,
    TOOL,
    ask,
    events,
    kinds,
    without_ids,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
NAMED = {"type": "function", "name": "get_weather"}
THOUGHT = "Why? <tool_call>no</tool_call>"

RECALLS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}",
)
"""Shows earlier thinking to the model."""
OPENED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + (
    "{{ tools | tojson if tools }}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Its prompt has the beginning of the thinking."""
HARMONY = (
    "<|system|>Effort: {{ reasoning_effort }}{{ tools | tojson if tools }}<|end|>"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How one family of models thinks, calls get_weather and answers."""

    template: str
    tools: str
    reasoning: str
    thought: str
    call: str
    answer: str = "{}"


FAMILIES = {
    "opens its thinking": Family(
        TEMPLATE, "hermes", "qwen3", f"<think>\n{THOUGHT}\n</think>\n\n", CALL
    ),
    "is opened by its prompt": Family(
        OPENED, "hermes", "deepseek-r1", f"{THOUGHT}\n</think>\n\n", CALL
    ),
    "has channels": Family(
        HARMONY,
        "gpt-oss",
        "gpt-oss",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        "<|channel|>final<|message|>{}",
    ),
}

CELLS = {
    "free": ({}, "Sure.", False, ""),
    "schema": ({"text": FORM}, '{"a": 1}', False, "json"),
    "object": ({"text": {"format": {"type": "json_object"}}}, '{"a": 1}', False, "json"),
    "called": ({"tools": [TOOL]}, "", True, ""),
    "not called": ({"tools": [TOOL]}, "Sure.", False, ""),
    "named": ({"tools": [TOOL], "tool_choice": NAMED}, "", True, "structural_tag"),
    "required": ({"tools": [TOOL], "tool_choice": "required"}, "", True, "structural_tag"),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, site: Site) -> Family:
    found = FAMILIES[request.param]
    site.state.service = service_with(site, found.template, found.tools, found.reasoning)
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_of_the_table_whole_and_streamed(
    site: Site, http: httpx.Client, family: Family, cell: str
) -> None:
    fields, text, is_called, grammar = CELLS[cell]
    written = family.thought + (family.call if is_called else family.answer.replace("{}", text))
    says(site, written, pieces=40)
    whole, found = ask(http, **fields), events(http, **fields)
    thinking, *rest = whole["output"]
    assert thinking["type"] == "reasoning" and thinking["summary"] == []
    assert thinking["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    if is_called:
        assert [(i["name"], i["arguments"]) for i in rest] == [("get_weather", ARGUMENTS)]
    else:
        assert [part["text"] for i in rest for part in i["content"]] == [text]
    order = [*THINKING, *(CALLING if is_called else MESSAGE)]
    assert kinds(found) == ["created", "in_progress", *order, "completed"]
    final = found[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    details = whole["usage"]["output_tokens_details"]
    assert final["usage"] == whole["usage"]
    assert len(THOUGHT) <= details["reasoning_tokens"] <= whole["usage"]["output_tokens"]
    asked = site.generator.asked[-1].message.grammar
    assert bool(asked) == bool(grammar)
    if grammar:
        constraint = Constraint.decode(asked)
        assert constraint.kind.startswith(grammar) and constraint.after, "thinking is free"


def test_thinking_a_text_and_calls_are_items_of_their_own(
    site: Site, http: httpx.Client, family: Family
) -> None:
    if family.tools == "gpt-oss":
        pytest.skip("this format answers or calls, never both in one turn")
    says(site, f"{family.thought}Let me see.\n{family.call}\n{family.call}", pieces=50)
    found = events(http, tools=[TOOL])
    assert kinds(found)[2:-1] == [*THINKING, *MESSAGE, *CALLING, *CALLING]
    ids = [e["item"]["id"] for e in found if e["type"] == "response.output_item.done"]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_thinking_that_is_cut_is_incomplete(
    site: Site, http: httpx.Client, family: Family, is_stream: bool
) -> None:
    begin = family.thought[: family.thought.index("no</")]
    says(site, begin, Finish("length"))
    limit = {"max_output_tokens": 30}
    body = events(http, **limit)[-1]["response"] if is_stream else ask(http, **limit)
    (thinking,) = body["output"]
    assert thinking["status"] == body["status"] == "incomplete"
    assert thinking["content"][0]["text"] == THOUGHT[: THOUGHT.index("no</")]


def test_thinking_that_breaks_off_is_incomplete_in_a_failed_response(
    site: Site, http: httpx.Client, family: Family
) -> None:
    broken = Finish("abort", None, 500, "the device broke", "engine_error")
    begin = family.thought[: family.thought.index("no</")]
    site.generator.script = lambda _: steps(begin, "", finish=broken)
    failed = events(http)[-1]
    assert failed["type"] == "response.failed"
    assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_every_effort_reaches_the_template_and_is_shown(
    site: Site, http: httpx.Client, effort: str
) -> None:
    family = FAMILIES["has channels"]
    site.state.service = service_with(site, family.template, family.tools, family.reasoning)
    body = ask(http, reasoning={"effort": effort})
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert f"Effort: {effort}" in prompt and body["reasoning"]["effort"] == effort


def test_an_effort_of_none_turns_a_switch_off_and_what_has_no_switch_is_reported(
    site: Site, http: httpx.Client
) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes", "qwen3")
    says(site, "\n\nSun")
    body = ask(http, reasoning={"effort": "none"})
    assert [item["type"] for item in body["output"]] == ["message"]
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert prompt.endswith("<|assistant|><think></think>")
    ask(http, reasoning={"effort": "high"})
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert prompt.endswith("<|assistant|>")
    site.state.service = service_with(site, OPENED, "hermes", "deepseek-r1")
    answer = http.post(PATH, json={"input": "Hi", "reasoning": {"effort": "low"}})
    assert "reasoning.effort: " in answer.headers["x-banyan-warnings"]


def test_thinking_goes_round_with_a_call_by_items_and_by_id(
    site: Site, client: openai.OpenAI
) -> None:
    says(site, f"<think>first</think>{CALL}")
    first = client.responses.create(model="tiny", input="Weather?", tools=[TOOL])
    thinking, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    says(site, "<think>second</think>Sunny")
    said = [{"role": "user", "content": "Weather?"}, *first.output, result]
    by_items = client.responses.create(model="tiny", input=said, tools=[TOOL], store=False)
    by_id = client.responses.create(
        model="tiny", input=[result], tools=[TOOL], previous_response_id=first.id
    )
    assert [i.type for i in by_items.output] == [i.type for i in by_id.output]
    one, two = (site.tokenizer.decode(r.prompt, False) for r in site.generator.asked[-2:])
    assert one == two
    assert "<|assistant|><think>first</think><tool_call>" in one and "<|tool|>sun<|end|>" in one
    says(site, "<think></think>Yes")
    client.responses.create(model="tiny", input="Sure?", previous_response_id=by_id.id)
    last = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert "<|assistant|><think>second</think>Sunny<|end|><|user|>Sure?" in last


def test_thinking_stays_between_the_calls_of_tool_servers(
    site: Site, client: openai.OpenAI
) -> None:
    site.state.tool_servers = ToolServers({"demo": DemoServer()})
    turns = [
        '<think>one</think><tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}'
        "</tool_call>",
        "<think>two</think>42",
    ]
    site.generator.script = lambda _: steps(*turns.pop(0))
    tool = {"type": "mcp", "server_label": "demo", "require_approval": "never"}
    found = client.responses.create(model="tiny", input="6*7?", tools=[tool])
    assert [item.type for item in found.output] == [
        *("mcp_list_tools", "reasoning", "mcp_call", "reasoning", "message"),
    ]
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert "<|assistant|><think>one</think><tool_call>" in prompt and "<|tool|>42<|end|>" in prompt
    # One token is one byte here: both thoughts with their marks are counted.
    thoughts = len("<think>one</think>") + len("<think>two</think>")
    assert found.usage.output_tokens_details.reasoning_tokens == thoughts
    site.state.tool_servers = ToolServers()


@pytest.fixture
def client(site: Site) -> openai.OpenAI:
    site.state.service = service_with(site, RECALLS, "hermes", "qwen3")
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)


def test_a_summary_is_a_thought_and_what_is_encrypted_is_reported(
    site: Site, http: httpx.Client, client: openai.OpenAI
) -> None:
    user = {"role": "user", "content": "Hi"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    ask(
        http, input=[user, {**summary, "id": "rs_1"}, {"role": "assistant", "content": "Yes"}, user]
    )
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, False)
    assert "<think>short</think>Yes" in prompt
    secret = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "xyz"}
    answer = http.post(PATH, json={"input": [user, secret, user]})
    assert answer.status_code == 200 and "encrypted" in answer.headers["x-banyan-warnings"]


def test_a_schema_is_parsed_by_the_client_behind_the_thinking(
    site: Site, client: openai.OpenAI
) -> None:
    from pydantic import BaseModel

    class Number(BaseModel):
        a: int

    says(site, f"<think>{THOUGHT}</think>\n{json.dumps({'a': 7})}", pieces=20)
    with client.responses.stream(model="tiny", input="Hi", text_format=Number) as stream:
        thoughts = [e.delta for e in stream if e.type == "response.reasoning_text.delta"]
        assert stream.get_final_response().output_parsed == Number(a=7)
    assert "".join(thoughts) == THOUGHT
