"""The tools that a request offers: validation, and the JSON types of their parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from banyan.base.errors import RequestError

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))

Definition = Mapping[str, object]


@dataclass(frozen=True)
class Tools:
    """Definitions by name, as {"type": "function", "function": {...}}, in the request's order."""

    definitions: Mapping[str, Definition]

    def __contains__(self, name: str) -> bool:
        return name in self.definitions

    def __len__(self) -> int:
        return len(self.definitions)

    def types_of(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that the schema allows for a parameter; empty = unspecified."""
        function = self.definitions.get(tool, {}).get("function")
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(found)


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return frozenset(("string",))
    branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list) and branches:
        found = [_types(branch) for branch in branches[:32] if isinstance(branch, Mapping)]
        # One branch that allows anything makes the whole schema allow anything.
        return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


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
    return name, {**given, "type": "function"}


def _schema_problem(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return f"it must be an object, not {type(schema).__name__}"
    kind = schema.get("type", "object")
    if kind != "object":
        return f"its type must be 'object', not {str(kind)[:40]!r}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return "its properties must be an object"
    for name, one in properties.items():
        if not isinstance(one, Mapping | bool):
            return f"property {name[:40]!r} must be a schema"
        wrong = sorted(_types(one) - _TYPES)
        if wrong:
            return f"property {name[:40]!r} has unknown type {wrong[0][:40]!r}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        return "required must be a list of names"
    return ""


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="tools")
