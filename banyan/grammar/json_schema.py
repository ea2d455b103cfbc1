"""What can be seen of a JSON schema without a library: references that lead out of it, and keywords
that a backend would pass over in silence. Such a schema is refused, because an output that breaks
it would look right.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object

WHITESPACE_LIMIT = 20
"""Most white space in a row between JSON tokens: a model that likes line breaks must go on."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("additionalProperties", "propertyNames", "items", "additionalItems", "contains", "not"),
    *("if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)

_ASSERTIONS = frozenset(
    (
        *("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependencies", "dependentRequired"),
        *("dependentSchemas", "unevaluatedProperties"),
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
        *("minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
"""Keywords that can make a value invalid (JSON Schema 2020-12 and its forerunners)."""

_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats that JSON Schema defines."""

Schema = Mapping[str, object]


Rule = Callable[[Schema], str]
"""What a schema object has that a backend would not honour, as text; "" when there is nothing."""


def check_schema(text: str, backend: str, rules: Sequence[Rule] = ()) -> None:
    """Refuse a schema that refers to the outside, or that breaks one of the backend's rules.

    Raises:
        RequestError: says what is at fault, and where.
    """
    for path, schema in _subschemas(json.loads(text)):
        target = schema.get("$ref")
        if isinstance(target, str) and not target.startswith("#"):
            raise RequestError(
                f"the schema at {path} refers to {target[:80]!r}; only references within the "
                "schema (#/…) are followed",
                hint="Put the definition into $defs.",
            )
        for rule in rules:
            if fault := rule(schema):
                raise RequestError(
                    f"{backend} would not honour {fault}, which the schema has at {path}",
                    hint="Leave it out, or start the server with another --grammar-backend.",
                )


def schemas_in_tag(part: object) -> Iterator[object]:
    """The schemas in a structural tag."""
    if is_object(part):
        for name, value in part.items():
            if name == "json_schema":
                yield value
            else:
                yield from schemas_in_tag(value)
    elif is_list(part):
        for value in part:
            yield from schemas_in_tag(value)


def without_unknown_formats(schema: object) -> object:
    """The same schema without formats that JSON Schema does not define: they are annotations.

    Args:
        schema: parsed JSON, which is changed.
    """
    for _, part in _subschemas(schema):
        name = part.get("format")
        if name is not None and name not in _FORMATS and isinstance(part, dict):
            del part["format"]
    return schema


def any_of(names: Iterable[str]) -> Rule:
    """One of these keywords, with a value that demands something."""
    wanted = frozenset(names)

    def rule(schema: Schema) -> str:
        return next((n for n in schema if n in wanted and schema[n] is not False), "")

    return rule


def conflicting_keyword(schema: Schema) -> str:
    """Return a keyword that defines the whole value next to others that constrain it too."""
    for name in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
        if name not in schema:
            continue
        others = [n for n in schema if n in _ASSERTIONS and n != name]
        if name in ("enum", "const"):
            values = schema[name] if name == "enum" else [schema[name]]
            others = [n for n in others if n != "type" or not _are_of_type(values, schema["type"])]
        if others:
            return f"{name!r} together with {others[0]!r}"
    return ""


def without_type(schema: Schema) -> str:
    """A keyword for one type of value, where the type is not given."""
    return "" if "type" in schema else _TYPED(schema)


def undeclared_required(schema: Schema) -> str:
    """A required member that is not among the properties."""
    required, properties = schema.get("required"), schema.get("properties")
    declared = properties if is_object(properties) else {}
    names = required if is_list(required) else []
    missing = next((str(n) for n in names if n not in declared), None)
    return "" if missing is None else f"the required member {missing[:40]!r}"


def _are_of_type(values: object, types: object) -> bool:
    allowed = types if is_list(types) else [types]
    return is_list(values) and all(
        any(_is_of_type(value, str(t)) for t in allowed) for value in values
    )


def _is_of_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int)
    if value is None:
        return name == "null"
    kinds = {"string": str, "number": int | float, "object": dict, "array": list}
    return name in kinds and isinstance(value, kinds[name])


def _subschemas(root: object) -> Iterator[tuple[str, Schema]]:
    """(path, schema) of every schema object within; not the values of enum, const or default."""
    stack: list[tuple[str, object]] = [("#", root)]
    while stack:
        path, schema = stack.pop()
        if not is_object(schema):
            continue
        yield path, schema
        for name, value in schema.items():
            here = f"{path}/{name[:40]}"
            if name in _MAPS and is_object(value):
                stack += [(f"{here}/{key[:40]}", v) for key, v in value.items()]
            elif name in _LISTS and is_list(value):
                stack += [(f"{here}/{i}", v) for i, v in enumerate(value)]
            elif name in _SINGLE:
                stack.append((here, value))


_TYPED = any_of(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "minItems", "maxItems", "items", "prefixItems"),
        *("required", "minProperties", "maxProperties"),
    )
)
