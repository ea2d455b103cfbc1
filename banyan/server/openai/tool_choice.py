"""tools, tool_choice and parallel_tool_calls: which tools the prompt shows, which calls are parsed
from the answer, and which calls a grammar enforces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.parsers.choice import Parsers
from banyan.parsers.tool_calls.base import ToolFormat
from banyan.parsers.tool_calls.definitions import Definition, Tools, read_tools
from banyan.parsers.tool_calls.json_calls import BARE_LIST
from banyan.requests.constraint import (
    Tag,
    check_depth,
    json_constraint,
    tool_calls_constraint,
)
from banyan.server.openai.custom_tools import CUSTOM, function_of
from banyan.server.openai.schema import ChatRequest

_ANY = 1 << 30
_OPEN = frozenset(
    (
        *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "minProperties"),
        *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
    )
)
"""Keywords by which a schema says itself which members there are."""


@dataclass(frozen=True)
class ToolUse:
    """Attributes:
    offered: the tools that the prompt shows.
    callable_: names of the tools that the model may call.
    format: syntax of calls; None = calls are not parsed.
    is_forced: the answer must be a call.
    """

    offered: Tools = Tools({})
    callable_: tuple[str, ...] = ()
    format: ToolFormat | None = None
    is_forced: bool = False
    max_calls: int = _ANY
    holds_form: bool = False
    """A call that the model begins must name a tool and have an object as arguments."""

    @property
    def is_strict(self) -> bool:
        """Whether a grammar is needed: a call is forced, its form is enforced, or a tool is
        `strict`."""
        return (
            self.is_forced
            or self.holds_form
            or any(_is_strict(self.offered.definitions[n]) for n in self.callable_)
        )

    def grammar(self, thinking_end: Sequence[int]) -> str:
        """`Generate.grammar` for these calls; "" when the model is free."""
        if self.format is None or not self.is_strict:
            return ""
        tag = self.format.tag
        if tag is None:
            return self._list_grammar(thinking_end) if self.is_forced else ""
        tags = []
        for name in self.callable_:
            begin, end = tag(name)
            definition = self.offered.definitions[name]
            exact = self.is_forced or _is_strict(definition)
            tags.append(Tag(begin, _schema(definition) if exact else {"type": "object"}, end))
        return tool_calls_constraint(
            tags,
            () if self.is_forced else (self.format.trigger,),
            parallel=self.max_calls > 1,
            thinking_end=thinking_end,
        )

    def _list_grammar(self, thinking_end: Sequence[int]) -> str:
        shared: dict[str, object] = {}
        items: list[object] = []
        for name in self.callable_:
            schema = dict(_schema(self.offered.definitions[name]))
            for defs in ("$defs", "definitions"):
                _share(shared, defs, schema.pop(defs, None))
            members = {"name": {"const": name}, "parameters": schema}
            items.append(
                {"type": "object", "properties": members, "required": list(members)}
                | {"additionalProperties": False}
            )
        whole = {"type": "array", "minItems": 1, "items": {"anyOf": items}, **shared}
        if self.max_calls == 1:
            whole["maxItems"] = 1
        return json_constraint(whole, thinking_end)


def tool_use(
    request: ChatRequest,
    parsers: Parsers,
    takes_tools: bool,
    shows_as_text: bool,
    warn: Callable[[str, str], None],
) -> ToolUse:
    """The tools of a request and how they may be called.

    Args:
        takes_tools: the chat template shows tools to the model.
        shows_as_text: the template does not, and tools are shown as text. The form of calls is
            then enforced, since the model may not have learnt it.
        warn: reports (field, why it has no effect).

    Raises:
        RequestError: the tools or the choice are malformed, or contradict each other.
    """
    check_depth(request.tools, "tools")
    functions, custom = _functions(request.tools or [], warn)
    tools = replace(read_tools(functions), custom=custom)
    choice = request.tool_choice if request.tool_choice is not None else "auto"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice, tools)
    else:
        allowed = tuple(tools.definitions)
    forced = _forced(choice, tools)
    if choice == "required":
        forced = allowed
    if not tools or choice == "none":
        return ToolUse()
    if not takes_tools and not shows_as_text:
        warn("tools", "this model's chat template does not show tools to the model")
    format = parsers.tools
    if forced and (format is None or format.tag is None):
        format = BARE_LIST
    if format is None:
        warn("tools", "calls stay text, because there is no tool-call parser for this model")
    elif format.tag is None and any(map(_is_strict, tools.definitions.values())):
        warn(
            "tools", "what is strict or has a grammar is not enforced in this model's form of calls"
        )
    single = request.parallel_tool_calls is False or isinstance(choice, dict)
    return ToolUse(
        offered=tools,
        callable_=forced or allowed,
        format=format,
        is_forced=bool(forced),
        max_calls=1 if single else _ANY,
        holds_form=shows_as_text,
    )


def _functions(
    given: Sequence[object], warn: Callable[[str, str], None]
) -> tuple[list[object], frozenset[str]]:
    """The functions, and the names of those that stand for custom tools. Tools of other types run
    elsewhere; they are reported."""
    found, custom = list[object](), set[str]()
    for index, tool in enumerate(given):
        kind = tool.get("type") if is_object(tool) else None
        if kind == CUSTOM and is_object(tool):
            found.append(function_of(tool, f"tools[{index}]"))
            inner = tool.get(CUSTOM)
            custom.add(str(inner.get("name")) if is_object(inner) else "")
        elif isinstance(kind, str) and kind != "function":
            warn(f"tools[{index}].type {kind[:40]!r}", "the model is not shown it: no function")
        else:
            found.append(tool)
    return found, frozenset(custom)


def _allowed(choice: Mapping[str, object], tools: Tools) -> tuple[str, tuple[str, ...]]:
    """Mode and names of {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}."""
    inner = choice.get("allowed_tools")
    mode, listed = (inner.get("mode"), inner.get("tools")) if is_object(inner) else (None, None)
    names: list[str] = []
    for one in listed if is_list(listed) else []:
        function = (one.get("function") or one.get(CUSTOM)) if is_object(one) else None
        name = function.get("name") if is_object(function) else None
        if not isinstance(name, str) or name not in tools:
            raise _refusal(f"tool_choice: Tool {str(name)[:80]!r} not found in tools list.")
        names.append(name)
    if mode not in ("auto", "required") or not names:
        raise _refusal(
            'tool_choice must be {"type": "allowed_tools", "allowed_tools": '
            '{"mode": "auto" | "required", "tools": [{"type": "function", "function": …}]}}'
        )
    return str(mode), tuple(dict.fromkeys(names))


def _forced(choice: str | Mapping[str, object], tools: Tools) -> tuple[str, ...]:
    """Names of the tools from which the model must call one; () = no call is required."""
    choice = "required" if choice == "any" else choice
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise _refusal(
                f"tool_choice must be auto, none, required or a function, not {choice[:40]!r}"
            )
        if choice == "required" and not tools:
            raise _refusal("Tools cannot be empty if tool choice is set to required.")
        return tuple(tools.definitions) if choice == "required" else ()
    function = choice.get("function") or choice.get(CUSTOM)
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") not in ("function", CUSTOM) or not isinstance(name, str):
        raise _refusal('tool_choice must be {"type": "function", "function": {"name": …}}')
    if not tools:
        raise _refusal("Tools cannot be empty if tool choice is set to a specific tool.")
    if name not in tools:
        raise _refusal(f"Tool {name[:80]!r} not found in tools list.")
    return (name,)


def _schema(definition: Definition) -> Mapping[str, object]:
    """The schema of a tool's arguments, without members that it does not name.

    JSON Schema allows any further member. A model that has to write something would invent some.
    """
    function = definition["function"]
    found = function.get("parameters") if is_object(function) else None
    schema = dict(found) if is_object(found) else {}
    if _OPEN & schema.keys():
        return schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    schema |= {"type": "object", "properties": properties}
    declared = properties if is_object(properties) else {}
    if all(name in declared for name in (required if is_list(required) else [])):
        schema["additionalProperties"] = False
    return schema


def _is_strict(definition: Definition) -> bool:
    function = definition["function"]
    return isinstance(function, Mapping) and function.get("strict") is True


def _share(shared: dict[str, object], name: str, given: object) -> None:
    """Copy definitions that schemas refer to by path to the root of the whole schema."""
    if not isinstance(given, Mapping):
        return
    known = shared.get(name)
    found = dict(known) if is_object(known) else {}
    for key, schema in given.items():
        if found.setdefault(key, schema) != schema:
            raise RequestError(
                f"two tools define {key[:40]!r} in {name} differently", param="tools"
            )
    shared[name] = found


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="tool_choice")
