"""Tools of a Responses request: the client's functions and those that tool servers offer.

Calls of the latter are sent to their tool server.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.server.errors import Json
from banyan.server.openai.custom_tools import CUSTOM
from banyan.server.openai.schema import Report, typed
from banyan.server.tool_servers.base import (
    ServerTool,
    ToolConnection,
    ToolOutcome,
    ToolServer,
    ToolServers,
    not_understood,
    refused,
)

MAX_CALLS = 64
MAX_TURNS = 16
"""How many calls tool servers answer for one response, and how often the model is asked anew."""

_NOT_A_FUNCTION = (
    "the model is not shown it: this server offers functions, custom tools and tools of type mcp"
)
_INVALID_PARAMS = -32602
"""JSON-RPC: the arguments do not fit."""


_KNOWN = frozenset(
    (
        *("type", "server_label", "server_url", "allowed_tools", "require_approval"),
        *("authorization", "headers", "connector_id", "tunnel_id"),
        *("server_description", "defer_loading", "allowed_callers"),
    )
)


class Filter(msgspec.Struct, frozen=True):
    tool_names: list[str] | None = None
    read_only: bool | None = None

    def takes(self, tool: ServerTool) -> bool:
        is_named = self.tool_names is None or tool.name in self.tool_names
        return is_named and self.read_only in (None, tool.is_read_only)


class ServerAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools` that asks for the tools of a tool server."""

    server_label: str
    server_url: str | None = None
    allowed_tools: list[str] | Filter | None = None
    require_approval: str | dict[str, object] | None = None

    def takes(self, tool: ServerTool) -> bool:
        allowed = self.allowed_tools
        if isinstance(allowed, list):
            return tool.name in allowed
        return allowed is None or allowed.takes(tool)


@dataclass(frozen=True)
class Shown:
    """The tools of one server that the model is shown, under the client's label for it."""

    label: str
    server: ToolServer
    tools: Sequence[ServerTool]


@dataclass(frozen=True)
class Offered:
    """All tools of a request.

    Attributes:
        functions: in the form of a chat request, tools of tool servers included.
        shown: the tool servers.
    """

    functions: Sequence[Json] = ()
    shown: Sequence[Shown] = ()

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that take a text."""
        inner = (tool[CUSTOM] for tool in self.functions if tool["type"] == CUSTOM)
        return frozenset(str(one.get("name")) for one in inner if is_object(one))

    @property
    def labels(self) -> dict[str, str]:
        """Label of the tool server for each of its tools."""
        return {tool.name: one.label for one in self.shown for tool in one.tools}


def offered_tools(given: Sequence[Json], servers: ToolServers, report: Report) -> Offered:
    """What the `tools` of a request offer.

    Args:
        report: takes (field, why it is not honoured).

    Raises:
        RequestError: a tool is malformed, or a tool server is none of this server's.
    """
    functions: list[Json] = []
    shown: list[Shown] = []
    for index, tool in enumerate(given):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind == "mcp":
            one = _asked(tool, servers, where, report)
            shown.append(one)
            functions += [_as_function(t) for t in one.tools]
        elif kind == "function":
            function = {k: v for k, v in tool.items() if k != "type" and v is not None}
            functions.append({"type": "function", "function": function})
        elif kind == CUSTOM:
            functions.append(
                {"type": CUSTOM, CUSTOM: {k: v for k, v in tool.items() if k != "type"}}
            )
        elif not isinstance(kind, str):
            raise RequestError(f"{where} must be an object with a type", param=where)
        else:
            report(f"{where}.type {kind[:40]!r}", _NOT_A_FUNCTION)
    labels = [one.label for one in shown]
    if len(set(labels)) < len(labels):
        raise RequestError("two tools have one server_label", param="tools")
    return Offered(functions, shown)


def _asked(tool: Json, servers: ToolServers, where: str, report: Report) -> Shown:
    for name in ("authorization", "headers", "connector_id", "tunnel_id"):
        if tool.get(name):
            raise RequestError(
                f"{name}: tool servers are called as this server was started to call them",
                param=where,
                code="not_available",
            )
    try:
        ask = typed(tool, ServerAsk)
    except RequestError as error:
        raise RequestError(f"{where}: {error.text}", param=where) from None
    if ask.require_approval is None:
        report(f"{where}.require_approval", "calls are made without approval, as for never")
    elif ask.require_approval != "never":
        raise RequestError(
            f"{where}.require_approval must be never: this server asks for no approvals",
            param=where,
            code="not_available",
        )
    for name in ("server_description", "defer_loading", "allowed_callers"):
        if tool.get(name):
            report(f"{where}.{name}", "not used")
    for name in sorted(tool.keys() - _KNOWN):
        report(f"{where}.{name}", "unknown field, ignored")
    server = servers.find(ask.server_label, ask.server_url or "", where)
    allowed = ask.allowed_tools
    names = allowed.tool_names if isinstance(allowed, Filter) else allowed
    if unknown := [name for name in names or [] if name not in server.tools]:
        raise RequestError(
            f"{where}.allowed_tools: {unknown[0][:80]!r} is no tool of {ask.server_label!r}, "
            f"which has: {', '.join(server.tools)}",
            param=where,
        )
    tools = [tool for tool in server.tools.values() if ask.takes(tool)]
    return Shown(ask.server_label, server, tools)


def _as_function(tool: ServerTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


def chat_choice(choice: str | Json | None, offered: Offered) -> object:
    """tool_choice as a chat request has it."""
    if not isinstance(choice, dict):
        return choice
    kind, name = choice.get("type"), choice.get("name")
    if kind == "allowed_tools":
        listed = choice.get("tools")
        names = [
            tool.get("name") for tool in (listed if is_list(listed) else []) if is_object(tool)
        ]
        allowed = [{"type": "function", "function": {"name": one}} for one in names]
        return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": allowed}}
    if kind == "mcp":
        label = choice.get("server_label")
        one = next((s for s in offered.shown if s.label == label), None)
        if one is None:
            raise _bad_choice(f"there is no tool with the server_label {str(label)[:80]!r}")
        if name is None and len(one.tools) == len(offered.functions):
            return "required"
        if name is None:
            raise _bad_choice("give the name of a tool too, where other tools are offered")
        if not any(tool.name == name for tool in one.tools):
            raise _bad_choice(f"{str(name)[:80]!r} is no tool of {label!r}")
    elif kind not in ("function", CUSTOM):
        raise RequestError(
            f"tool_choice of type {str(kind)[:40]!r} is not available; "
            "give auto, none, required, a function or a tool of type mcp",
            param="tool_choice",
            code="not_available",
        )
    return {"type": "function", "function": {"name": name}}


def _bad_choice(why: str) -> RequestError:
    return RequestError(f"tool_choice: {why}", param="tool_choice")


@dataclass
class ServerCalls:
    """Answers the calls of one response, at most `limit` of them, each server on one line."""

    offered: Offered
    limit: int
    _lines: dict[str, ToolConnection] = field(default_factory=dict)

    async def outcome(self, item: Json) -> ToolOutcome:
        """Call the item's tool server, and return the outcome."""
        if self.limit <= 0:
            return refused("not called: this response may make no more calls")
        self.limit -= 1
        arguments = _arguments(str(item["arguments"]))
        if arguments is None:
            return not_understood(_INVALID_PARAMS, "the arguments are no JSON object")
        return await self._line(str(item["server_label"])).call(str(item["name"]), arguments)

    async def close(self) -> None:
        lines = list(self._lines.values())
        self._lines.clear()
        await asyncio.gather(*(line.close() for line in lines))

    def _line(self, label: str) -> ToolConnection:
        if label not in self._lines:
            (server,) = (one.server for one in self.offered.shown if one.label == label)
            self._lines[label] = server.open()
        return self._lines[label]


def _arguments(text: str) -> Json | None:
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def first_listings(offered: Offered, before: Sequence[Json]) -> list[Shown]:
    """The tool servers whose tools no item of the conversation has listed."""
    listed = {item["server_label"] for item in before if item["type"] == "mcp_list_tools"}
    return [one for one in offered.shown if one.label not in listed]


def shown_tools(given: Sequence[Mapping[str, object]]) -> list[Json]:
    """The `tools` of a request as its response shows them."""
    return [
        {**tool} if tool.get("type") == "mcp" else {"parameters": None, "strict": False, **tool}
        for tool in given
    ]
