"""--tool-server: connects to the named tool servers and lists their tools.

"demo" is in this process: a calculator and a clock. No code of a model is run: an expression is
parsed, and a few kinds of nodes are evaluated under limits of length and size.
"""

import ast
import asyncio
import datetime
import math
import operator
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import logger
from banyan.server.errors import Json
from banyan.server.tool_servers.base import (
    ServerTool,
    ToolOutcome,
    ToolServer,
    ToolServers,
    gave,
    not_understood,
    refused,
)

_MAX_CHARS = 200
_MAX_BITS = 4096
_INVALID_PARAMS = -32602
"""JSON-RPC: invalid params."""

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NAMES: Mapping[str, Number] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[[Number], Number]] = {
    **{"sqrt": math.sqrt, "exp": math.exp, "ln": math.log, "log10": math.log10, "abs": abs},
    **{"sin": math.sin, "cos": math.cos, "tan": math.tan, "round": round},
}

_TOOLS = (
    ServerTool(
        "calculator",
        "Compute an arithmetic expression: + - * / // % **, parentheses, pi, e, and "
        f"{', '.join(_FUNCTIONS)} of one number. Angles are in radians.",
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "e.g. (3 + 4) * 12"}},
            "required": ["expression"],
        },
        {"readOnlyHint": True},
    ),
    ServerTool(
        "clock",
        "The date and time of now.",
        {
            "type": "object",
            "properties": {
                "time_zone": {"type": "string", "description": "e.g. Europe/Oslo; UTC if absent"}
            },
        },
        {"readOnlyHint": True},
    ),
)


class DemoServer:
    """The demo tools. It is its own session, since calls keep no state."""

    label = "demo"
    url = ""
    tools: Mapping[str, ServerTool] = {tool.name: tool for tool in _TOOLS}

    def open(self) -> "DemoServer":
        return self

    async def call(self, name: str, arguments: Json) -> ToolOutcome:
        argument = "expression" if name == "calculator" else "time_zone"
        text = arguments.get(argument, None if name == "calculator" else "UTC")
        if not isinstance(text, str) or arguments.keys() - {argument}:
            return not_understood(_INVALID_PARAMS, f"{name} takes {argument!r}, a text")
        try:
            return gave(calculate(text) if name == "calculator" else _now(text))
        except ValueError as error:
            return refused(str(error))

    async def close(self) -> None:
        """Nothing is open."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression; ValueError with the reason if it has none."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression has at most {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(one))
    raise ValueError("only numbers, + - * / // % ** and the named functions are computed")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > _MAX_BITS:
            raise OverflowError
        return base**exponent
    power = float(base) ** exponent
    if isinstance(power, complex):
        raise ValueError("a root of a negative number is not real")
    return power


def _bounded(value: Number) -> Number:
    """`value`; OverflowError if it is an integer of too many bits."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    return value


def _now(time_zone: str) -> str:
    try:
        zone = ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone {time_zone[:80]!r}") from None
    return datetime.datetime.now(zone).strftime("%A, %Y-%m-%d %H:%M:%S %Z (UTC%z)")


log = logger(__name__)

DEMO = "demo"
"""Name of the tool server in this process."""
_PATHS = ("/sse", "/mcp")
"""Paths that are tried, in order, for a server given as HOST:PORT."""


async def start_tool_servers(names: str) -> ToolServers:
    """Connect to the servers of a comma-separated list: `demo`, HOST:PORT, or a URL.

    Raises:
        ConfigError: a name is malformed, a server does not respond, two have the same label, or the
            package of the protocol is not installed.
    """
    servers = await asyncio.gather(*(_start(name) for name in named_servers(names)))
    found: dict[str, ToolServer] = {}
    for server in servers:
        if server.label in found:
            raise ConfigError(f"--tool-server names two servers that are called {server.label!r}")
        found[server.label] = server
        where = server.url or "in this process"
        log.info("tools of %s (%s): %s", server.label, where, ", ".join(server.tools) or "none")
    return ToolServers(found)


def named_servers(names: str) -> list[str]:
    """The names of a comma-separated list."""
    return [name.strip() for name in names.split(",")] if names else []


async def _start(name: str) -> ToolServer:
    if name == DEMO:
        return DemoServer()
    urls = addresses(name)
    try:
        from banyan.server.tool_servers.mcp_server import open_server
    except ImportError as error:
        raise ConfigError(
            f"--tool-server {name} needs the package mcp, which cannot be imported: {error}",
            hint=f"run: {install_command('tools')}",
        ) from None
    return await open_server(urls)


def addresses(name: str) -> list[str]:
    """URLs to try for a server; ConfigError if `name` is not an address."""
    has_scheme = "://" in name
    try:
        parts = urlsplit(name if has_scheme else f"http://{name}")
        is_whole = bool(parts.hostname) and (has_scheme or parts.port is not None)
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"--tool-server takes demo, HOST:PORT or an http(s) URL, separated by commas; "
            f"{name!r} is none of them"
        )
    if has_scheme and parts.path not in ("", "/"):
        return [name]
    return [f"{parts.scheme}://{parts.netloc}{path}" for path in _PATHS]
