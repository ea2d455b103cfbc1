"""Tools of type custom: they take a text, which a grammar may constrain.

The model is shown a function with the one argument `input`. Source: the public reference of
OpenAI's API.
"""

import json
from collections.abc import Mapping, Sequence

from banyan.base.errors import RequestError
from banyan.base.json_types import is_object
from banyan.parsers.answer_deltas import AnswerDelta, ToolCallArguments, ToolCallStart
from banyan.parsers.partial_json import object_text
from banyan.requests.constraint import MAX_REGEX_BYTES
from banyan.requests.lark import MAX_CHARS, regex_of_lark
from banyan.server.errors import Json

INPUT = "input"
CUSTOM = "custom"
_MEMBERS = frozenset(("name", "description", "format"))


def function_of(tool: Mapping[str, object], where: str) -> Json:
    """The function that stands for a tool {"type": "custom", "custom": {…}}.

    Raises:
        RequestError: it is malformed, or its grammar cannot be enforced.
    """
    inner = tool.get(CUSTOM)
    if not is_object(inner):
        raise _refusal(f'{where} must be {{"type": "custom", "custom": {{"name": …}}}}')
    if unknown := sorted(inner.keys() - _MEMBERS):
        raise _refusal(f"{where}.custom has no member {unknown[0][:60]!r}")
    taken: Json = {"type": "string"}
    syntax, definition = _grammar(inner.get("format"), where)
    if syntax:
        pattern = regex_of_lark(definition) if syntax == "lark" else definition
        taken["pattern"] = f"^(?:{pattern})$"
        taken["description"] = f"A text by this {syntax} grammar:\n{definition}"
    function: Json = {
        "name": inner.get("name"),
        "parameters": {
            "type": "object",
            "properties": {INPUT: taken},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
    if inner.get("description") is not None:
        function["description"] = inner["description"]
    if syntax:
        function["strict"] = True
    return {"type": "function", "function": function}


def _grammar(form: object, where: str) -> tuple[str, str]:
    """Syntax and definition of a tool's grammar; "" when its text is free."""
    if form is None or (is_object(form) and form.get("type") == "text"):
        return "", ""
    at = f"{where}.custom.format"
    if not is_object(form) or form.get("type") != "grammar":
        raise _refusal(f"{at}.type must be text or grammar")
    grammar = form.get("grammar")
    grammar = grammar if is_object(grammar) else form
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in ("lark", "regex"):
        raise _refusal(f"{at}.syntax must be lark or regex, got {str(syntax)[:40]!r}")
    if not isinstance(definition, str) or not definition:
        raise _refusal(f"{at}.definition must be a text")
    most = MAX_CHARS if syntax == "lark" else MAX_REGEX_BYTES
    if len(definition.encode("utf-8", "surrogatepass")) > most:
        raise _refusal(f"{at}.definition has more than {most} bytes")
    return syntax, definition


def call_as_function(call: Json) -> Json:
    """An earlier call of a custom tool as a call of its function; others as they are."""
    inner = call.get(CUSTOM)
    if call.get("type") != CUSTOM or not is_object(inner):
        return call
    arguments = json.dumps({INPUT: inner.get(INPUT)}, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != CUSTOM}
    return {
        **rest,
        "type": "function",
        "function": {"name": inner.get("name"), "arguments": arguments},
    }


def input_of(arguments: str) -> str:
    """The text that a call gives a custom tool; all arguments if the model gave them otherwise."""
    found = json.loads(object_text(arguments)).get(INPUT)
    return found if isinstance(found, str) else arguments


class CustomCalls:
    """Turns the arguments of each call of a custom tool into one delta with its input.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: int | None = None
        self._texts: list[str] = []
        self.indices: set[int] = set()
        """Calls of custom tools so far."""

    def merged(self, parts: Sequence[AnswerDelta], is_last: bool) -> list[AnswerDelta]:
        found: list[AnswerDelta] = []
        for part in parts:
            if isinstance(part, ToolCallArguments) and part.index == self._open:
                self._texts.append(part.text)
                continue
            found += self._ended()
            if isinstance(part, ToolCallStart) and part.name in self._names:
                self._open = part.index
                self.indices.add(part.index)
            found.append(part)
        return found + self._ended() if is_last else found

    def _ended(self) -> list[AnswerDelta]:
        if self._open is None:
            return []
        ended = ToolCallArguments(self._open, input_of("".join(self._texts)))
        self._open, self._texts = None, []
        return [ended]


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="tools")
