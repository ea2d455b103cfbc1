"""The demo tools: a calculator and a clock, in this process.

No code of a model is run: an expression is parsed, and a few kinds of nodes are evaluated under
limits of length and size.
"""

import ast
import datetime
import math
import operator
from collections.abc import Callable, Mapping
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from banyan.server.errors import Json
from banyan.server.tool_servers.base import ServerTool, ToolOutcome, gave, not_understood, refused

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
