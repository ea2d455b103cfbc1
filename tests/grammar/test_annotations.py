"""Annotations of a JSON schema never refuse it: only keywords that can make a value invalid do."""

import json

import pytest

from banyan.base.errors import BanyanError, RequestError
from banyan.grammar.base import Backend
from banyan.messages.requests import JSON_SCHEMA
from tests.grammar.play import compiled, open_backend

ANNOTATIONS = {
    **{"title": "T", "description": "d", "default": "x", "examples": ["a"], "$comment": "c"},
    **{"deprecated": True, "readOnly": True, "writeOnly": False, "example": "e"},
    **{"contentEncoding": "base64", "contentMediaType": "text/plain", "nullable": True},
    **{"x-order": 1, "errorMessage": "m", "markdownDescription": "x", "propertyOrdering": ["a"]},
    **{"externalDocs": {}, "xml": {}, "enumDescriptions": ["a"], "discriminator": {}},
}
FORMATS = ("phone", "password", "binary", "byte", "color", "int32", "credit-card", "")


@pytest.fixture(scope="module", params=["xgrammar", "llguidance", "outlines"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return open_backend(request.param)
    except BanyanError as error:
        pytest.skip(str(error))


def schema(**extra: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"a": {"type": "string", **extra}},
        "required": ["a"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotation_is_accepted_anywhere(backend: Backend, name: str) -> None:
    note = {name: ANNOTATIONS[name]}
    compiled(backend, JSON_SCHEMA, json.dumps(schema(**note)))
    compiled(backend, JSON_SCHEMA, json.dumps(schema() | note))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_json_schema_does_not_define_is_an_annotation(
    backend: Backend, name: str
) -> None:
    compiled(backend, JSON_SCHEMA, json.dumps(schema(format=name)))
    number = {"type": "object", "properties": {"a": {"type": "integer", "format": name}}}
    number |= {"required": ["a"], "additionalProperties": False}
    compiled(backend, JSON_SCHEMA, json.dumps(number))


def test_a_name_that_looks_like_a_format_is_a_name(backend: Backend) -> None:
    named = {"type": "object", "properties": {"format": {"type": "string"}}}
    named |= {"required": ["format"], "additionalProperties": False}
    compiled(backend, JSON_SCHEMA, json.dumps(named))


def test_a_schema_without_a_finite_value_is_refused_in_words() -> None:
    looped = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    with pytest.raises(RequestError) as refused:
        compiled(open_backend("llguidance"), JSON_SCHEMA, json.dumps(looped))
    assert "refers to itself" in str(refused.value)
