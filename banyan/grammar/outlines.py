"""The outlines_core library: a regex, or a schema without recursion turned into one, as a table of
states and tokens. Slow to compile, so meant for few and small constraints.
"""

import json
import re

import numpy as np
import outlines_core

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.grammar.base import Matcher
from banyan.grammar.json_schema import (
    Schema,
    any_of,
    check_schema,
    conflicting_keyword,
    undeclared_required,
    without_type,
    without_unknown_formats,
)
from banyan.grammar.vocabulary import Encode, Vocabulary
from banyan.messages.requests import JSON_SCHEMA, REGEX, Constraint

MAX_ROLLBACK = 256
"""Tokens that can be taken back; drafts are far fewer."""

_FORMATS = ("date", "time", "date-time", "uuid")
_LITERAL = re.compile(r"\^?(?:[\w @#%&=:;,<>!~/-]|\[[\w -]+\]|\\[dw]|[()?*+]|\{[\d,]+\})*\$?")
"""Patterns that cannot match a quote, a backslash or a control character."""


def _unescaped(schema: Schema) -> str:
    """Names, values and patterns go into the regex as they are, so none may need escapes."""
    if schema.get("format", "date") not in _FORMATS:
        return f"the format {str(schema['format'])[:40]!r}"
    pattern = schema.get("pattern")
    if pattern is not None and not (isinstance(pattern, str) and _LITERAL.fullmatch(pattern)):
        return "the 'pattern'"
    properties = schema.get("properties")
    names = list(properties) if is_object(properties) else []
    return next((f"the name {n[:40]!r}" for n in names if json.dumps(n)[1:-1] != n), "")


def _half_done(schema: Schema) -> str:
    """Keywords that are honoured in some company only."""
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        return "'pattern' together with a length"
    if "properties" in schema and schema.get("additionalProperties", False) is not False:
        return "'additionalProperties' together with 'properties'"
    if "prefixItems" in schema and any(n in schema for n in ("items", "minItems", "maxItems")):
        return "'prefixItems' together with other limits"
    if schema.get("anyOf") == []:
        return "an empty 'anyOf'"
    many = schema.get("allOf")
    return "'allOf'" if is_list(many) and len(many) != 1 else ""


def _anything(schema: Schema) -> str:
    """A value of any kind becomes alternatives without brackets around them."""
    said = ("type", "enum", "const", "$ref", "anyOf", "allOf", "properties")
    return "" if any(name in schema for name in said) else "a schema that allows anything"


_RULES = (
    any_of(
        (
            *("not", "if", "oneOf", "dependencies", "dependentRequired", "dependentSchemas"),
            *("contains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
            *("minProperties", "maxProperties", "propertyNames", "patternProperties"),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
            *("$dynamicRef", "$recursiveRef"),
        )
    ),
    conflicting_keyword,
    without_type,
    undeclared_required,
    _unescaped,
    _half_done,
    _anything,
)
"""Found by generating from small schemas at random and validating the outcome."""


class Outlines:
    """Satisfies grammar.base.Backend."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode, whitespace: str | None) -> None:
        ids: dict[bytes, list[int]] = {}
        for id, token in enumerate(vocabulary.tokens):
            if token and id not in vocabulary.end_ids:
                ids.setdefault(token, []).append(id)
        self._vocabulary = outlines_core.Vocabulary(vocabulary.end_ids[0], ids)
        self._whitespace = whitespace

    def compile(self, constraint: Constraint) -> bytes:
        index = outlines_core.Index(self._regex(constraint), self._vocabulary)
        _, (compiled,) = index.__reduce__()
        return compiled

    def load(self, compiled: bytes) -> "_Program":
        return _Program(outlines_core.Index.from_binary(compiled), len(compiled))

    def _regex(self, constraint: Constraint) -> str:
        if constraint.kind == REGEX:
            return constraint.text
        if constraint.kind != JSON_SCHEMA:
            raise RequestError(
                f"outlines cannot compile {constraint.kind}",
                hint="Start the server with --grammar-backend xgrammar or llguidance.",
            )
        text = json.dumps(without_unknown_formats(json.loads(constraint.text)))
        check_schema(text, "outlines", _RULES)
        return outlines_core.json_schema.build_regex_from_schema(text, self._whitespace)


class _Program:
    def __init__(self, index: outlines_core.Index, size_bytes: int) -> None:
        self._index = index
        self.size_bytes = size_bytes

    def start(self) -> Matcher:
        return _Matcher(outlines_core.Guide(self._index, MAX_ROLLBACK))


class _Matcher:
    def __init__(self, guide: outlines_core.Guide) -> None:
        self._guide = guide
        self.problem = ""

    def fill(self, mask: np.ndarray) -> None:
        self._guide.write_mask_into(mask.ctypes.data, mask.size, mask.itemsize)

    def forced(self) -> list[int]:
        """The library knows tokens alone, and the same text may be written in several ways."""
        return []

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def rollback(self, count: int) -> None:
        self._guide.rollback_state(count)

    def is_complete(self) -> bool:
        return self._guide.is_finished()
