"""The tools that a request offers: validation, and the JSON types of their parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object

MAX_TOOLS = 1024
_MAX_DEPTH = 8
_MAX_BRANCHES = 32
"""References and alternatives that are followed to find a parameter's type."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))

Definition = Mapping[str, object]


@dataclass(frozen=True)
class Tools:
    """Definitions by name, as {"type": "function", "function": {...}}, in the request's order.

    `custom` are the names of those that take a text, as their one argument.
    """

    definitions: Mapping[str, Definition]
    custom: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.definitions

    def __len__(self) -> int:
        return len(self.definitions)

    def types_of(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that the schema allows for a parameter; empty = unspecified."""
        return _types(self._properties(tool).get(parameter), self._schema(tool))

    def has_parameter(self, tool: str, parameter: str) -> bool:
        return parameter in self._properties(tool)

    def _schema(self, tool: str) -> Mapping[str, object]:
        function = self.definitions.get(tool, {}).get("function")
        schema = function.get("parameters") if is_object(function) else None
        return schema if is_object(schema) else {}

    def _properties(self, tool: str) -> Mapping[str, object]:
        found = self._schema(tool).get("properties")
        return found if is_object(found) else {}


def _types(schema: object, root: object, depth: int = 0) -> frozenset[str]:
    """JSON types that `schema` allows; empty = unspecified.

    Args:
        root: the schema in which references are looked up.
    """
    if not is_object(schema) or depth > _MAX_DEPTH:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if is_list(kind):
        return frozenset(k for k in kind if isinstance(k, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if is_list(values) and values:
        return frozenset().union(*map(json_types, values))
    if isinstance(target := schema.get("$ref"), str):
        return _types(_referred(target, root), root, depth + 1)
    every = schema.get("allOf")
    for branch in every[:_MAX_BRANCHES] if is_list(every) else []:
        if found := _types(branch, root, depth + 1):
            return found
    branches = schema.get("anyOf") or schema.get("oneOf")
    if is_list(branches) and branches:
        shown = [b for b in branches[:_MAX_BRANCHES] if is_object(b)]
        kinds = [_types(branch, root, depth + 1) for branch in shown]
        # One branch that allows anything makes the whole schema allow anything.
        return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset()


def _referred(target: str, root: object) -> object:
    """The schema at a JSON pointer below `root`, as #/$defs/Name; None if there is none."""
    found = root
    for part in unquote(target.removeprefix("#")).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if is_object(found) else None
    return found if target.startswith("#/") else None


def json_types(value: object) -> frozenset[str]:
    """The JSON types of a value; an integer is also a number."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number", "integer") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
    return frozenset(("object",))


def read_tools(given: object) -> Tools:
    """The `tools` field of a request.

    Raises:
        RequestError: 400 naming the tool and what is wrong with it.
    """
    if not isinstance(given, list):
        raise _refusal("tools must be a list of functions")
    if len(given) > MAX_TOOLS:
        raise _refusal(f"at most {MAX_TOOLS} tools are accepted, got {len(given)}")
    found: dict[str, Definition] = {}
    for index, one in enumerate(cast(Sequence[object], given)):
        name, definition = _tool(one, index)
        if name in found:
            raise _refusal(f"two tools are called {name!r}")
        found[name] = definition
    return Tools(found)


def _tool(given: object, index: int) -> tuple[str, Definition]:
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        raise _refusal(f'tools[{index}] must be {{"type": "function", "function": {{…}}}}')
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(
            f"tools[{index}].function.name must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
        )
    if not isinstance(function.get("description"), str | None):
        raise _refusal(f"tools[{index}].function.description must be a text")
    schema = function.get("parameters")
    if schema is not None and (problem := _schema_problem(schema)):
        raise _refusal(f"Tool {index} function has invalid 'parameters' schema: {problem}")
    kept = {member: value for member, value in function.items() if value is not None}
    if isinstance(schema, Mapping):
        kept["parameters"] = {k: v for k, v in schema.items() if v is not None}
    return name, {**given, "type": "function", "function": kept}


def _schema_problem(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return f"it must be an object, not {type(schema).__name__}"
    kind = schema.get("type")
    if kind not in (None, "object"):
        return f"its type must be 'object', not {str(kind)[:40]!r}"
    properties = schema.get("properties")
    properties = {} if properties is None else properties
    if not isinstance(properties, Mapping):
        return "its properties must be an object"
    for name, one in properties.items():
        if not isinstance(one, Mapping | bool):
            return f"property {name[:40]!r} must be a schema"
        wrong = sorted(_types(one, schema) - _TYPES)
        if wrong:
            return f"property {name[:40]!r} has unknown type {wrong[0][:40]!r}"
    required = schema.get("required")
    required = [] if required is None else required
    if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        return "required must be a list of names"
    return ""


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="tools")
