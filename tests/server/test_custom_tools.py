"""Tools of type custom: a text instead of arguments, by a grammar if one is given, in both APIs."""

import json
import re
from random import Random

import httpx
import openai
import pytest

from banyan.base.errors import BanyanError, RequestError
from banyan.messages.requests import Constraint
from banyan.parsers.answer_deltas import ToolCallArguments
from banyan.parsers.choice import Parsers
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
from banyan.requests.lark import regex_of_lark
from banyan.server.openai.custom_tools import input_of
from banyan.server.openai.schema import ChatRequest
from banyan.server.openai.tool_choice import tool_use
from tests.grammar.play import begin, compiled, open_backend, play
from tests.requests.test_lark import PATCH
from tests.server.fakes import Site
from tests.server.talk import TEMPLATE, USER, says, service_with

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SUM = 'start: NUM (("+" | "*") NUM)~1..3 "\\n"\nNUM: /[1-9][0-9]?/'
SQL = r'SELECT "[a-z]{1,3}\\[tn]"\n?'
INPUT = 'line "one"\n\\two \u00e9'
CALL = f"<tool_call>{json.dumps({'name': 'patch', 'arguments': {'input': INPUT}})}</tool_call>"


def grammar(syntax: str, definition: str) -> dict[str, object]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def chat_tool(form: object = None, **extra: object) -> dict[str, object]:
    custom = {"name": "patch", "description": "Patches.", **extra}
    return {"type": "custom", "custom": custom | ({"format": form} if form else {})}


def flat_tool(form: dict[str, object] | None = None) -> dict[str, object]:
    inner = (form or {}).get("grammar", {})
    shown = {"format": {"type": "grammar", **inner}} if form else {}
    return {"type": "custom", "name": "patch", "description": "Patches.", **shown}


@pytest.fixture
def talking(site: Site) -> Site:
    site.state.service = service_with(site, TEMPLATE, "hermes")
    says(site, CALL, pieces=7)
    return site


@pytest.fixture
def client(talking: Site) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0)


def test_a_chat_gets_the_text_of_a_call(client: openai.OpenAI, talking: Site) -> None:
    asked = {"model": "tiny", "messages": USER, "tools": [chat_tool()]}
    answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", INPUT)
    assert answer.choices[0].finish_reason == "tool_calls"
    pieces = [
        c.choices[0].delta.tool_calls for c in client.chat.completions.create(**asked, stream=True)
    ]
    heads, *rest = [call for calls in pieces for call in calls or []]
    assert heads.type == "custom" and heads.id
    written = [call.model_extra["custom"] for call in (heads, *rest)]
    assert written[0]["name"] == "patch"
    assert "".join(one["input"] for one in written) == INPUT
    again = [*USER, answer.choices[0].message.model_dump(exclude_none=True)]
    again.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    client.chat.completions.create(**asked | {"messages": again})
    prompt = talking.tokenizer.decode(talking.generator.asked[-1].prompt, skip_special_tokens=False)
    assert json.dumps({"input": INPUT}, ensure_ascii=False) in prompt


def test_a_response_has_an_item_of_its_own(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "input": "Hi", "tools": [flat_tool()]}
    answer = client.responses.create(**asked)
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", INPUT)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert done.input == "".join(deltas) == INPUT
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert events[-2].item.input == INPUT and events[-1].response.output[0].input == INPUT
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    client.responses.create(model="tiny", input=[result], previous_response_id=answer.id)


def test_functions_beside_it_are_as_ever(client: openai.OpenAI, talking: Site) -> None:
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    says(talking, '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>' + CALL, pieces=5)
    tools = [function, chat_tool()]
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=tools)
    look, patch = answer.choices[0].message.tool_calls
    assert json.loads(look.function.arguments) == {"a": 1} and patch.custom.input == INPUT
    flat = [{"type": "function", **function["function"]}, flat_tool()]
    first, second = client.responses.create(model="tiny", input="Hi", tools=flat).output
    assert (first.type, second.type) == ("function_call", "custom_tool_call")


def test_both_apis_ask_for_the_same(talking: Site, http: httpx.Client) -> None:
    found: list[str] = []
    for form in (None, grammar("lark", SUM), grammar("regex", "a+")):
        for choice in ("auto", "required", {"type": "custom", "name": "patch"}):
            wrapped = choice if isinstance(choice, str) else {"type": "custom", "custom": choice}
            bodies = {
                CHAT: {"messages": USER, "tools": [chat_tool(form)], "tool_choice": wrapped},
                RESPONSES: {"input": "Hi", "tools": [flat_tool(form)], "tool_choice": choice},
            }
            pair: list[str] = []
            for path, body in bodies.items():
                answer = http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                assert "x-banyan-warnings" not in answer.headers
                pair.append(talking.generator.asked[-1].message.grammar)
            assert pair[0] == pair[1] and bool(pair[0]) == (form is not None or choice != "auto")
            found.append(pair[0])
    assert len(set(found)) == 9


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (grammar("lark", 'start: "(" start ")" | "x"'), "'start' contains itself"),
        (grammar("lark", 'start: "a"\n%ignore " "'), "%ignore"),
        (grammar("peg", "a"), "lark or regex"),
        (grammar("regex", ""), "must be a text"),
        (grammar("regex", "a" * (1 << 20)), "bytes"),
        ({"type": "xml"}, "text or grammar"),
        ({"type": "grammar"}, "lark or regex"),
        (7, "text or grammar"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    talking: Site, http: httpx.Client, form: object, why: str
) -> None:
    answer = http.post(CHAT, json={"messages": USER, "tools": [chat_tool(form)]})
    assert answer.status_code == 400 and why in answer.text, answer.text


def test_a_tool_that_is_malformed_is_refused(talking: Site, http: httpx.Client) -> None:
    for tool in ({"type": "custom"}, {"type": "custom", "custom": {"name": 7}}, chat_tool(x=1)):
        answer = http.post(CHAT, json={"messages": USER, "tools": [tool]})
        assert answer.status_code == 400 and "tools" in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "cut', "cut"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_the_text_of_arguments(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("lark", SUM, regex_of_lark(SUM)),
        ("lark", PATCH, regex_of_lark(PATCH)),
        ("regex", SQL, SQL),
    ],
    ids=["sum", "patch", "quotes"],
)
def test_what_is_drawn_under_the_grammar_follows_it(
    name: str, syntax: str, definition: str, pattern: str
) -> None:
    request = ChatRequest(
        messages=[], tools=[chat_tool(grammar(syntax, definition))], tool_choice="required"
    )
    hermes = Parsers("hermes", TOOL_PARSERS.load("hermes"))
    use = tool_use(request, hermes, True, False, lambda *_: None)
    constraint = Constraint.decode(use.grammar(()))
    try:
        program = compiled(open_backend(name), constraint.kind, constraint.text)
    except RequestError as error:  # the server's other backend takes it
        assert name == "xgrammar" and "pattern" in error.text
        return
    except BanyanError as error:
        pytest.skip(str(error))
    num_ended = 0
    for seed in range(8):
        played = play(begin(program, constraint), Random(seed), most=600)
        assert not played.is_stuck
        if not played.is_ended:
            continue  # a free part of the text without end
        num_ended += 1
        parser = ToolParser(use.format, use.offered, use.max_calls)
        parts = [*parser.feed(played.text), *parser.finish()]
        texts = [p.text for p in parts if isinstance(p, ToolCallArguments) and p.index == 0]
        assert re.fullmatch(pattern, input_of("".join(texts))), played.text
    assert num_ended or definition == PATCH
