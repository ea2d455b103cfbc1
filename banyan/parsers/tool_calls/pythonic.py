"""Calls written as a Python list: Llama 4, Llama 3.2 and others.

    [f(city="Paris", days=3), g()]

Python's own parser reads the list; nothing is executed, and only literals are accepted as values.
Without the tags of Llama 4 around it, a list is text unless it calls tools of the request.
Source: the prompt-format page of Llama 4 (zero-shot function calling).
"""

import ast
import json
import re
import warnings

from banyan.parsers.incremental import Delimiters, Malformed, Reading, StreamingText
from banyan.parsers.partial_json import MAX_DEPTH
from banyan.parsers.tool_calls.base import ToolCallWriter, ToolFormat, read_or_text

MAX_CHARS = 1 << 16
"""Longest list, which is parsed at once."""

_START, _END = "<|python_start|>", "<|python_end|>"
_DELIMITERS = Delimiters("[", _START, _END)
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_WORD = re.compile(r"[\w.]*", re.ASCII)
_OTHER = re.compile(r"[^\[\](){}'\"\\]*")
_STRING = re.compile(r"[^'\"\\]*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def _read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    is_tagged = False
    while opener := (yield from source.until(_DELIMITERS, out.add_text)):
        if opener == "[":
            yield from read_or_text(source, out, "[", _calls(source, out, is_tagged))
        else:
            is_tagged = opener == _START


def _calls(source: StreamingText, out: ToolCallWriter, is_tagged: bool) -> Reading[None]:
    """Read a list of calls after its opening bracket."""
    parts = ["[" + (yield from source.spaces())]
    word: list[str] = []
    yield from source.run(_WORD, word.append)
    name = "".join(word)
    if not _NAME.fullmatch(name) or (yield from source.need()) != "(":
        raise Malformed
    if not (is_tagged or name in out.tools):
        raise Malformed
    parts.append(name)
    yield from _rest_of_list(source, parts)
    calls = _parsed("".join(parts))
    if not is_tagged and any(name not in out.tools for name, _ in calls):
        raise Malformed
    for name, arguments in calls:
        out.begin_call(name)
        out.add_arguments(arguments)
        out.end_call()


def _rest_of_list(source: StreamingText, parts: list[str]) -> Reading[None]:
    """Collect up to the bracket that closes the list, across nested strings and brackets."""
    open_closers = ["]"]
    num_chars = 0
    while open_closers:
        in_string = open_closers[-1] in "'\""
        word: list[str] = []
        yield from source.run(_STRING if in_string else _OTHER, word.append)
        parts += word
        num_chars += 1 + sum(map(len, word))
        char = yield from source.need()
        if char == "\\":
            yield from source.need(2)
            parts.append(source.take(2))
            continue
        parts.append(source.take(1))
        if char == open_closers[-1]:
            open_closers.pop()
        elif not in_string and char in "'\"":
            open_closers.append(char)
        elif not in_string and char in _CLOSING:
            open_closers.append(_CLOSING[char])
        elif not in_string:
            raise Malformed
        if len(open_closers) > MAX_DEPTH or num_chars > MAX_CHARS:
            raise Malformed


def _parsed(text: str) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of every call; Malformed if the list contains anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the model's strings
            tree = ast.parse(text, mode="eval")
        if not isinstance(tree.body, ast.List):
            raise Malformed
        return [_call(node) for node in tree.body.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def python_json(text: str) -> str | None:
    """A Python literal as JSON; None for any other text. Nothing is executed."""
    if len(text) > MAX_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = _literal(ast.parse(text, mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unpacked arguments")
        arguments[keyword.arg] = _literal(keyword.value)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return _dotted(node.func), text


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("not a name")


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Name(id="null"):
            return None
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(k): _literal(v) for k, v in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a text")


FORMAT = ToolFormat(_read, (_START, _END))
