"""Forced tool calls of every format, drawn at random under their grammar, are read back as calls
whose arguments fit the tool's schema."""

import json
from random import Random

import pytest

from banyan.base.errors import BanyanError
from banyan.grammar.base import Backend
from banyan.messages.requests import Constraint
from banyan.parsers.answer_deltas import TextDelta, ToolCallArguments, ToolCallStart
from banyan.parsers.choice import Parsers
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
from banyan.server.openai.schema import ChatRequest
from banyan.server.openai.tool_choice import ToolUse, tool_use
from tests.grammar.play import begin, compiled, open_backend, play

PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["on", "size"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": PARAMETERS}}
    for name in ("search", "switch")
]
NAMED = {"type": "function", "function": {"name": "switch"}}
FORMATS = list({id(TOOL_PARSERS.load(n)): n for n in reversed(TOOL_PARSERS.names())}.values())
"""One name of each format."""
DRAWS = 3


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return open_backend(request.param)
    except BanyanError as error:
        pytest.skip(str(error))


def use_of(name: str, **fields: object) -> ToolUse:
    request = ChatRequest(messages=[], tools=TOOLS, **fields)
    return tool_use(request, Parsers(name, TOOL_PARSERS.load(name)), True, False, lambda *_: None)


def read(use: ToolUse, text: str) -> tuple[list[tuple[str, object]], str]:
    parser = ToolParser(use.format, use.offered, use.max_calls)
    parts = [*parser.feed(text), *parser.finish()]
    found = [
        (
            start.name,
            json.loads(
                "".join(
                    p.text
                    for p in parts
                    if isinstance(p, ToolCallArguments) and p.index == start.index
                )
            ),
        )
        for start in parts
        if isinstance(start, ToolCallStart)
    ]
    return found, "".join(p.text for p in parts if isinstance(p, TextDelta))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_calls_that_fit_their_schema(
    backend: Backend, name: str, choice: object
) -> None:
    use = use_of(name, tool_choice=choice, parallel_tool_calls=choice == NAMED)
    constraint = Constraint.decode(use.grammar([]))
    program = compiled(backend, constraint.kind, constraint.text)
    num_ended = 0
    for seed in range(DRAWS):
        played = play(begin(program, constraint), Random(seed), most=400)
        assert not played.is_stuck
        if not played.is_ended:
            continue  # white space without end, which the grammar allows
        num_ended += 1
        found, said = read(use, played.text)
        assert len(found) == 1 and not said.strip(), played.text
        ((called, arguments),) = found
        assert called in (("switch",) if choice == NAMED else ("search", "switch"))
        assert isinstance(arguments["on"], bool) and arguments["size"] in ("s", "m")
    assert num_ended


@pytest.mark.parametrize("name", [n for n in FORMATS if TOOL_PARSERS.load(n).tag])
def test_a_tag_is_what_the_parser_reads(name: str) -> None:
    format = TOOL_PARSERS.load(name)
    before, behind = format.tag("search")
    assert before.startswith(format.trigger)
    use = use_of(name)
    call = before + '{"on": true}' + behind
    assert read(use, "Well. " + call + call) == ([("search", {"on": True})] * 2, "Well.")


def test_free_answers_need_no_grammar() -> None:
    plain = [{"type": "function", "function": {"name": "f"}}]
    request = ChatRequest(messages=[], tools=plain)
    parsers = Parsers("hermes", TOOL_PARSERS.load("hermes"))
    assert tool_use(request, parsers, True, False, lambda *_: None).grammar([]) == ""
    assert use_of("hermes").grammar([]).startswith("structural_tag:")
    assert use_of("hermes", tool_choice="none").grammar([]) == ""


# parameters -> arguments that a forced call may have; the keys are all that it may name
PARTIAL = {
    "no parameters": ({}, set()),
    "null": ({"parameters": None}, set()),
    "empty": ({"parameters": {}}, set()),
    "an object": ({"parameters": {"type": "object"}}, set()),
    "no properties": ({"parameters": {"type": "object", "properties": {}}}, set()),
    "null properties": (
        {"parameters": {"type": "object", "properties": None, "required": None}},
        set(),
    ),
    "no type": ({"parameters": {"properties": {"on": {"type": "boolean"}}}}, {"on"}),
    "optional": (
        {"parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}},
        {"on"},
    ),
    "referred": (
        {
            "parameters": {
                "type": "object",
                "properties": {"on": {"$ref": "#/$defs/On"}},
                "$defs": {"On": {"type": "boolean"}},
            }
        },
        {"on"},
    ),
}


@pytest.mark.parametrize("case", PARTIAL)
@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "gpt-oss"])
def test_a_forced_call_names_the_parameters_of_its_schema_alone_and_then_ends(
    backend: Backend, name: str, case: str
) -> None:
    function, names = PARTIAL[case]
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        request = ChatRequest(messages=[], tools=tools, tool_choice=choice)
        parsers = Parsers(name, TOOL_PARSERS.load(name))
        use = tool_use(request, parsers, True, False, lambda *_: None)
        constraint = Constraint.decode(use.grammar([]))
        program = compiled(backend, constraint.kind, constraint.text)
        num_ended = 0
        for seed in range(DRAWS):
            played = play(begin(program, constraint), Random(seed), most=300)
            found, said = read(use, played.text)
            assert not played.is_stuck and not (played.is_ended and said.strip()), played.text
            whole = found if played.is_ended else found[:-1]
            assert all(called == "f" and arguments.keys() <= names for called, arguments in whole)
            num_ended += played.is_ended
        assert num_ended
