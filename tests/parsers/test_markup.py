"""Arguments in tags: any text, tags that the model leaves out, Python literals, types by schema."""

import json

import pytest

from banyan.parsers.answer_deltas import TextDelta, ToolCallArguments, ToolCallStart
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
from banyan.parsers.tool_calls.definitions import read_tools

WHO = {"$ref": "#/$defs/Who"}
PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "list": {"type": "array"},
    "map": {"type": "object"},
    "some": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    "ref": WHO,
    "all": {"allOf": [WHO]},
    "any": {"anyOf": [WHO, {"type": "null"}]},
    "const": {"const": "5"},
    "enum": {"enum": ["1", "2"]},
    "number": {"enum": [1, 2]},
    "loop": {"$ref": "#/properties/loop"},
    "lost": {"$ref": "#/$defs/Nobody"},
}
SCHEMA = {
    "type": "object",
    "$defs": {"Who": {"enum": ["1", "2"], "type": "string"}},
    "properties": PROPERTIES,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]

# format: (begin, one parameter, its closing tag, end of the call, what follows)
FORMATS = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n",
        "<parameter={0}>\n{1}\n",
        "</parameter>\n",
        "</function>\n",
        "</tool_call>",
    ),
    "glm45": (
        "<tool_call>f\n",
        "<arg_key>{0}</arg_key>\n<arg_value>{1}",
        "</arg_value>\n",
        "</tool_call>",
        "",
    ),
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f">\n',
        '<steptml:parameter name="{0}">{1}',
        "</steptml:parameter>\n",
        "</steptml:invoke>",
        "<｜tool_call_end｜><｜tool_calls_end｜>",
    ),
    "deepseekv32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n',
        '<｜DSML｜parameter name="{0}" string="true">{1}',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
    ),
}
TYPED = [name for name in FORMATS if name != "deepseekv32"]  # its models write the type


def written(name: str, values: list[tuple[str, str]], without: str = "") -> str:
    """A call with these parameters, without its "value" or its "call" closing tags."""
    begin, parameter, value_end, end, follows = FORMATS[name]
    value_end = "" if without == "value" else value_end
    end = "" if without == "call" else end
    return begin + "".join(parameter.format(*v) + value_end for v in values) + end + follows


def parsed(name: str, text: str, step: int = 0) -> tuple[list[tuple[str, object]], str]:
    """Calls with their arguments, and the text; fed `step` characters at a time (0 = at once)."""
    parser = ToolParser(TOOL_PARSERS.load(name), read_tools(TOOLS))
    pieces = [text[i : i + step] for i in range(0, len(text), step)] if step else [text]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls = [
        (start.name, [p.text for p in parts if isinstance(p, ToolCallArguments) and p.index == i])
        for i, start in enumerate(p for p in parts if isinstance(p, ToolCallStart))
    ]
    said = "".join(p.text for p in parts if isinstance(p, TextDelta))
    return [(called, json.loads("".join(texts))) for called, texts in calls], said


def check(name: str, text: str, arguments: object) -> None:
    for step in (0, 1, 7):
        assert parsed(name, text, step) == ([("f", arguments)], "")


def awkward(name: str) -> list[str]:
    """Texts that look like the tags around them."""
    begin, parameter, value_end, end, follows = FORMATS[name]
    close, opener = value_end.strip(), parameter.format("i", "5")
    return [
        f"a{close}b",
        f"{close} is the end",
        f"a {close}{close} b",
        f"twice {close} and {close}.",
        f"{end.strip()} and then",
        f"a {end.strip()}\nb",
        f"{begin.strip()} begins",
        f"half of {opener[:9]}",
        f"a {parameter.format('none of its own', 'x')}",
        "<b>&amp;</b> \\ \" {'a': 1}",
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_an_argument_is_any_text(name: str) -> None:
    for text in awkward(name):
        check(name, written(name, [("s", text)]), {"s": text})
        if name != "deepseekv32":
            check(name, written(name, [("s", text), ("i", "5")]), {"s": text, "i": 5})


@pytest.mark.parametrize("name", TYPED)
def test_a_value_without_its_closing_tag_ends_at_the_next_parameter_or_call(name: str) -> None:
    values = [("s", "x"), ("i", "5"), ("list", "[1]")]
    for count in (1, 2, 3):
        wanted = dict(list({"s": "x", "i": 5, "list": [1]}.items())[:count])
        text = written(name, values[:count], without="value")
        if name == "glm45" or count == 1:
            text = text.replace("x<", "x\n<")
        found, said = parsed(name, text)
        assert found == parsed(name, text, 1)[0] and not said
        ((_, arguments),) = found
        assert {k: v.strip() if isinstance(v, str) else v for k, v in arguments.items()} == wanted


@pytest.mark.parametrize("name", ["qwen3_coder", "step3", "deepseekv32"])
def test_a_call_without_its_end_ends_where_the_next_thing_begins(name: str) -> None:
    check(name, written(name, [("s", "x")], without="call"), {"s": "x"})


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("list", "['a', 'b']", ["a", "b"]),
        ("list", "('a', None)", ["a", None]),
        ("map", "{'city': 'P', 'on': True}", {"city": "P", "on": True}),
        ("some", "['it''s']", ["its"]),
        ("some", "None", None),
        ("list", "[__import__('os')]", "[__import__('os')]"),
        ("list", "{'a': 1}", "{'a': 1}"),
        ("s", "['a', 'b']", "['a', 'b']"),
        ("ref", "1", "1"),
        ("all", "1", "1"),
        ("any", "1", "1"),
        ("any", "null", None),
        ("const", "5", "5"),
        ("enum", "2", "2"),
        ("number", "2", 2),
        ("loop", "3", 3),
        ("lost", "3", 3),
    ],
)
def test_a_value_has_the_type_of_its_schema(
    name: str, parameter: str, text: str, value: object
) -> None:
    check(name, written(name, [(parameter, text)]), {parameter: value})
