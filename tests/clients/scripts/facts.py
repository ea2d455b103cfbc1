"""For scripts that run in a client's own interpreter: named facts about its answers, as JSON.

Needs nothing but the standard library. The tests that read the facts say what must hold.
"""

import asyncio
import contextlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[[], object])

URL = os.environ.get("CHAT_URL", "") + "/v1"
KEY = os.environ.get("CHAT_KEY", "")
VECTORS_URL = os.environ.get("VECTORS_URL", "") + "/v1"
MODEL = "demo"
LONG = 6000
"""Tokens that no script waits for; a test sees that they were not made."""

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SPOKEN_CALL = (
    r'<tool_call>\n\{"name": "get_weather", "arguments": '
    r'\{"city": "[A-Z][a-z]{2,8}", "unit": "celsius"\}\}\n</tool_call>'
)
"""A regex that makes even a small model call a tool of its own accord."""


class Facts:
    """Functions by name, each of which asks the server for something and says what came."""

    def __init__(self) -> None:
        self._asked: dict[str, Callable[[], object]] = {}

    def fact(self, function: F) -> F:
        self._asked[function.__name__] = function
        return function

    def report(self) -> None:
        """Ask for all and write the facts to standard output; one that raises says so."""
        # One loop for all, because clients keep connections; some print hints of their own.
        with asyncio.Runner() as loop, contextlib.redirect_stdout(sys.stderr):
            found = {name: _found(asked, loop) for name, asked in self._asked.items()}
        print(json.dumps(found))


def _found(asked: Callable[[], object], loop: asyncio.Runner) -> dict[str, object]:
    try:
        value = asked()
        return {"value": loop.run(_result(value)) if inspect.isawaitable(value) else value}
    except Exception:
        return {"raised": traceback.format_exc()}


async def _result(value: Awaitable[object]) -> object:
    return await value


def refusal(call: Callable[[], object]) -> dict[str, object]:
    """What a client makes of a request that must be refused."""
    try:
        call()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "status": getattr(error, "status_code", None), "text": str(error)}
    return {"kinds": [], "status": None, "text": "it was not refused"}


def usage_of(usage: object) -> list[int]:
    """[prompt, completion, total] of an OpenAI usage object."""
    return [getattr(usage, f"{name}_tokens") for name in ("prompt", "completion", "total")]
