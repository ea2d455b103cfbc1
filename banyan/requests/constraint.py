"""From request fields to `Generate.grammar`, for every API.

Checks size, depth and form. Whether the grammar backend can compile it is decided by the engine.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from banyan.base.errors import RequestError
from banyan.messages.requests import (
    EBNF,
    FREE,
    JSON_SCHEMA,
    KINDS,
    REGEX,
    STRUCTURAL_TAG,
    Constraint,
)

MAX_TEXT_BYTES = 512 << 10
"""A schema, grammar or structural tag."""
MAX_REGEX_BYTES = 16 << 10
MAX_DEPTH = 128
"""Nesting of a schema or structural tag."""

_ANY_JSON = "$$ANY$$"
_META = frozenset(".^$*+?{}[]|()\\/-")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

Fields = Mapping[str, object]


@dataclass(frozen=True)
class Tag:
    """A marked part: the text `begin`, a value of `schema`, the text `end`."""

    begin: str
    schema: Mapping[str, object] | bool
    end: str


def native_constraint(raw: Fields) -> dict[str, object]:
    """The constraint of an OpenAI body as fields of sampling_params; {} when there is none.

    Takes response_format, the four native names, and the fields of vLLM and llama.cpp.

    Raises:
        RequestError: a field is malformed, or two fields constrain the output.
    """
    found: list[tuple[str, str, object]] = []
    for name, translate in _SOURCES.items():
        value = raw.get(name)
        if value is None or value == "":
            continue
        native = translate(value)
        if native is not None:
            found.append((name, *native))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise RequestError(f"{names} both constrain the output; give one", param=found[1][0])
    return {native: value for _, native, value in found}


def parse_constraint(values: Fields) -> str:
    """`Generate.grammar` of native sampling_params; "" when nothing is constrained.

    Raises:
        RequestError: names the field, the rule and the value; 400.
    """
    given = [kind for kind in KINDS if values.get(kind) not in (None, "")]
    if not given:
        return ""
    if len(given) > 1:
        raise RequestError(
            f"only one of {', '.join(KINDS)} may be given, got {' and '.join(given)}",
            param=given[1],
        )
    kind = given[0]
    return Constraint(kind, _CHECKS[kind](values[kind], kind)).encode()


def start_after(grammar: str, thinking_end: Sequence[int]) -> str:
    """The same constraint, beginning after these token ids (the end of the thinking)."""
    if not grammar:
        return ""
    constraint = Constraint.decode(grammar)
    return Constraint(constraint.kind, constraint.text, tuple(thinking_end)).encode()


def with_budget(
    grammar: str, budget: int, thinking_start: Sequence[int], thinking_end: Sequence[int]
) -> str:
    """The same constraint, or none, whose thinking has at most so many tokens.

    Args:
        thinking_start: the budget holds if the output begins with these ids; () = it begins inside.
    """
    end, start = tuple(thinking_end), tuple(thinking_start)
    if not grammar:
        return Constraint(FREE, "", end, budget, start).encode()
    found = Constraint.decode(grammar)
    return Constraint(found.kind, found.text, found.after or end, budget, start).encode()


def tool_calls_constraint(
    tags: Sequence[Tag],
    triggers: Sequence[str],
    *,
    parallel: bool = True,
    thinking_end: Sequence[int] = (),
) -> str:
    """`Generate.grammar` for tool calls.

    Args:
        tags: one for each tool; a marker that is a token of its own may stand in `begin` or `end`.
        triggers: the output is free text until one of them, then exactly one of `tags`; each tag's
            `begin` starts with one. None = the output is tags and nothing else.
        parallel: more tags may follow the first.
        thinking_end: the constraint begins after these token ids.

    Raises:
        RequestError: the schemas together are too large or too deep.
    """
    form: dict[str, object] = {
        "tags": [_tag(tag.begin, tag.schema, tag.end) for tag in tags],
        "stop_after_first": not parallel,
    }
    if triggers:
        form |= {"type": "triggered_tags", "triggers": list(triggers)}
    else:
        form |= {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    text = _dump({"type": STRUCTURAL_TAG, "format": form})
    _check_size(text, "tools", MAX_TEXT_BYTES)
    check_depth(form, "tools")
    return Constraint(STRUCTURAL_TAG, text, tuple(thinking_end)).encode()


def json_constraint(schema: Mapping[str, object] | bool, thinking_end: Sequence[int] = ()) -> str:
    """`Generate.grammar` for a value of `schema`; RequestError when it is too large or deep."""
    text = _json_schema(schema, "schema")
    return Constraint(JSON_SCHEMA, text, tuple(thinking_end)).encode()


# -- OpenAI fields ------------------------------------------------------------------------------


def _response_format(value: object) -> tuple[str, object] | None:
    name = "response_format"
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", param=name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return JSON_SCHEMA, '{"type": "object"}' if schema is None else schema
    if kind == "json_schema":
        outer = value.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, dict) else value.get("schema")
        if schema is None:
            raise RequestError(
                f"{name}.json_schema.schema is missing",
                param=name,
                hint='Send {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
            )
        return JSON_SCHEMA, schema
    if kind == STRUCTURAL_TAG:
        return STRUCTURAL_TAG, value
    if kind in _TYPED_FORMATS:
        native, members = _TYPED_FORMATS[str(kind)]
        found = next((value[m] for m in members if value.get(m) is not None), None)
        if found is None:
            raise RequestError(f"{name}.{members[0]} is missing", param=name)
        return native, found
    raise RequestError(
        f"{name}.type must be text, json_object, json_schema, structural_tag, "
        f"{', '.join(_TYPED_FORMATS)}, got {str(kind)[:40]!r}",
        param=name,
    )


def _choice(value: object, name: str = "guided_choice") -> tuple[str, object]:
    choices = cast(list[object], value) if isinstance(value, list) else []
    if not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError(f"{name} must be a list of texts", param=name.partition(".")[0])
    return REGEX, "|".join(f"({_literal(cast(str, c))})" for c in choices)


def _any_object(value: object, name: str = "guided_json_object") -> tuple[str, object] | None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", param=name.partition(".")[0])
    return (JSON_SCHEMA, '{"type": "object"}') if value else None


def _structured_outputs(value: object) -> tuple[str, object] | None:
    """vLLM's field: an object with one constraint."""
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", param=name)
    given = {str(k): v for k, v in value.items() if v is not None and v is not False}
    if unknown := sorted(given.keys() - _MEMBERS.keys()):
        raise RequestError(
            f"{name}.{unknown[0][:40]} is not honoured; known are {', '.join(_MEMBERS)}", param=name
        )
    if len(given) > 1:
        raise RequestError(f"{name} has {' and '.join(given)}; give one", param=name)
    return next((_MEMBERS[k](v) for k, v in given.items()), None)


def _same(kind: str) -> Callable[[object], tuple[str, object]]:
    return lambda value: (kind, value)


_TYPED_FORMATS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "regex": (REGEX, ("pattern", "regex", "value")),
    "grammar": (EBNF, ("grammar",)),
    "json": (JSON_SCHEMA, ("schema", "value")),
}
"""Types of response_format on other servers -> kind of constraint, members that hold it."""

_MEMBERS: Mapping[str, Callable[[object], tuple[str, object] | None]] = {
    "json": _same(JSON_SCHEMA),
    "regex": _same(REGEX),
    "choice": lambda value: _choice(value, "structured_outputs.choice"),
    "grammar": _same(EBNF),
    "json_object": lambda value: _any_object(value, "structured_outputs.json_object"),
    "structural_tag": _same(STRUCTURAL_TAG),
}
"""Members of structured_outputs."""

_SOURCES: Mapping[str, Callable[[object], tuple[str, object] | None]] = {
    "response_format": _response_format,
    "json_schema": _same(JSON_SCHEMA),
    "regex": _same(REGEX),
    "ebnf": _same(EBNF),
    "structural_tag": _same(STRUCTURAL_TAG),
    "guided_json": _same(JSON_SCHEMA),
    "guided_regex": _same(REGEX),
    "guided_choice": _choice,
    "guided_grammar": _same(EBNF),
    "guided_json_object": _any_object,
    "structured_outputs": _structured_outputs,
    "grammar": _same(EBNF),
}

FIELDS = tuple(_SOURCES)
"""Fields of an OpenAI body that constrain the output."""


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in _META else _ESCAPES.get(c, c) for c in text)


# -- checks -------------------------------------------------------------------------------------


def _json_schema(value: object, name: str) -> str:
    if value == _ANY_JSON:
        value = {}
    schema = _parsed(value, name)
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"{name} must be an object or a boolean, got {type(schema).__name__}", param=name
        )
    check_depth(schema, name)
    return _dump(schema)


def _structural_tag(value: object, name: str) -> str:
    tag = _parsed(value, name)
    if not isinstance(tag, dict):
        raise RequestError(f"{name} must be an object, got {type(tag).__name__}", param=name)
    check_depth(tag, name)
    form = tag.get("format")
    if form is None:
        form = _from_structures(tag, name)
    if not isinstance(form, dict):
        raise RequestError(
            f"{name} must have a format, or structures and triggers",
            param=name,
            hint='Send {"type": "structural_tag", "format": {"type": "triggered_tags", …}}.',
        )
    return _dump({"type": STRUCTURAL_TAG, "format": form})


def _from_structures(tag: Fields, name: str) -> object:
    """The older form, {"structures": [{begin, schema, end}], "triggers": […]}, in the newer."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        return None
    tags = []
    for part in structures:
        if not isinstance(part, dict) or not isinstance(part.get("schema"), dict | bool):
            raise RequestError(f"{name}.structures must be {{begin, schema, end}}", param=name)
        tags.append(_tag(part.get("begin"), part["schema"], part.get("end")))
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _tag(begin: object, schema: object, end: object) -> dict[str, object]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(limit: int) -> Callable[[object, str], str]:
    def check(value: object, name: str) -> str:
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a text, got {type(value).__name__}", param=name)
        _check_size(value, name, limit)
        return value

    return check


_CHECKS: Mapping[str, Callable[[object, str], str]] = {
    JSON_SCHEMA: _json_schema,
    REGEX: _text(MAX_REGEX_BYTES),
    EBNF: _text(MAX_TEXT_BYTES),
    STRUCTURAL_TAG: _structural_tag,
}


def _parsed(value: object, name: str) -> object:
    """`value`, read when it is JSON text; RequestError unless it is JSON of a fair size."""
    try:
        if isinstance(value, str):
            _check_size(value, name, MAX_TEXT_BYTES)
            return json.loads(value, parse_constant=_no_constant)
        _check_size(_dump(value), name, MAX_TEXT_BYTES)
    except RecursionError:
        raise _too_deep(name) from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"{name} is not JSON: {str(error)[:200]}", param=name) from None
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _check_size(text: str, name: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} has unpaired surrogates", param=name) from None
    if size > limit:
        raise RequestError(f"{name} has {size:,} bytes, at most {limit:,} are read", param=name)


def check_depth(value: object, name: str) -> None:
    """RequestError 400 when the field `name` is nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep(name)


def _too_deep(name: str) -> RequestError:
    return RequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", param=name)


def _dump(value: object) -> str:
    """One spelling for equal values; members stay in their order, which outputs follow."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
