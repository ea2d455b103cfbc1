"""From request fields to one constraint: every spelling, and what is refused at the door."""

import json

import pytest

from banyan.base.errors import RequestError
from banyan.messages.requests import Constraint
from banyan.requests.constraint import (
    MAX_DEPTH,
    MAX_REGEX_BYTES,
    MAX_TEXT_BYTES,
    Tag,
    json_constraint,
    native_constraint,
    parse_constraint,
    start_after,
    tool_calls_constraint,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def constraint(**fields: object) -> Constraint:
    return Constraint.decode(parse_constraint(native_constraint(fields)))


def refused(**fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_constraint(native_constraint(fields))
    return caught.value


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_the_encoded_form_survives_a_round_trip():
    for text in ("", "a:b@c", '{"x": "é"}'):
        for after in ((), (7,), (1, 2, 3)):
            one = Constraint("regex", text, after)
            assert Constraint.decode(one.encode()) == one
    for opening in ((), (4, 5)):
        one = Constraint("free", "", (7, 8), 1 << 30, opening)
        assert Constraint.decode(one.encode()) == one


@pytest.mark.parametrize("encoded", ["", "regex", "python:x", "@3:x"])
def test_what_is_no_constraint_is_not_decoded(encoded: str):
    with pytest.raises(ValueError, match="constraint"):
        Constraint.decode(encoded)


def test_nothing_asked_for_is_no_constraint():
    assert native_constraint({"response_format": {"type": "text"}, "regex": None, "ebnf": ""}) == {}
    assert parse_constraint({}) == ""
    assert parse_constraint({"regex": "", "json_schema": None}) == ""


def test_every_spelling_of_a_schema_is_the_same_constraint():
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    spellings = [
        constraint(response_format=wrapped),
        constraint(guided_json=SCHEMA),
        constraint(guided_json=json.dumps(SCHEMA, indent=2)),
        constraint(json_schema=json.dumps(SCHEMA)),
    ]
    assert len(set(spellings)) == 1
    assert spellings[0].kind == "json_schema"
    assert list(json.loads(spellings[0].text)["properties"]) == ["b", "a"]


def test_json_mode_is_any_object_and_any_json_is_any_value():
    assert json.loads(constraint(response_format={"type": "json_object"}).text) == {
        "type": "object"
    }
    assert constraint(json_schema="$$ANY$$").text == "{}"


def test_choices_become_a_regex_that_matches_them_literally():
    assert constraint(guided_choice=["yes", "n.o", "a|b"]).text == r"(yes)|(n\.o)|(a\|b)"


def test_the_older_structural_tag_is_the_newer():
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f"],
    }
    form = json.loads(constraint(response_format=older).text)["format"]
    content = {"type": "json_schema", "json_schema": SCHEMA}
    assert form == {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}],
    }


def test_tool_calls_are_tags_after_a_trigger_or_alone():
    tags = [Tag('<tool>{"name": "f", "arguments": ', SCHEMA, "}</tool>")]
    decoded = Constraint.decode(
        tool_calls_constraint(tags, ["<tool>"], parallel=False, thinking_end=[9, 10])
    )
    form = json.loads(decoded.text)["format"]
    assert decoded.after == (9, 10) and form["stop_after_first"] is True
    assert form["triggers"] == ["<tool>"] and form["tags"][0]["end"] == "}</tool>"
    form = json.loads(Constraint.decode(tool_calls_constraint(tags, [])).text)["format"]
    assert form["type"] == "tags_with_separator" and form["at_least_one"] is True


def test_a_constraint_can_begin_after_the_thinking():
    assert start_after("", [5]) == ""
    assert Constraint.decode(start_after(json_constraint(SCHEMA), [5, 6])).after == (5, 6)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "both constrain"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "both constrain"),
        ({"regex": 3}, "regex", "must be a text, got int"),
        ({"regex": "(a|b)" * MAX_REGEX_BYTES}, "regex", "at most 16,384"),
        ({"regex": "\ud800"}, "regex", "surrogates"),
        ({"ebnf": "x" * (MAX_TEXT_BYTES + 1)}, "ebnf", "at most 524,288"),
        ({"json_schema": "{"}, "json_schema", "is not JSON"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema", "is not JSON"),
        ({"json_schema": '{"minimum": ' + "9" * 5000 + "}"}, "json_schema", "is not JSON"),
        ({"json_schema": "3"}, "json_schema", "an object or a boolean, got int"),
        ({"json_schema": "[" * 100_000}, "json_schema", "levels deep"),
        ({"guided_json": nested(10_000)}, "json_schema", "levels deep"),
        ({"guided_json": nested(MAX_DEPTH)}, "json_schema", "more than 128 levels deep"),
        ({"guided_json": {"enum": ["x" * 99] * 10_000}}, "json_schema", "at most 524,288"),
        ({"guided_choice": []}, "guided_choice", "a list of texts"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "a list of texts"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "yaml"}}, "response_format", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"structural_tag": "{}"}, "structural_tag", "must have a format"),
        ({"structural_tag": "[]"}, "structural_tag", "must be an object"),
        ({"structural_tag": {"structures": [1], "triggers": []}}, "structural_tag", "begin"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value[:20],
)
def test_a_malformed_constraint_is_refused_by_name(
    fields: dict[str, object], param: str, text: str
):
    error = refused(**fields)
    assert error.status == 400 and error.param == param
    assert text in error.text and len(error.text) < 400


def test_the_deepest_schema_that_is_read_is_read():
    assert constraint(guided_json=nested(MAX_DEPTH - 1))
