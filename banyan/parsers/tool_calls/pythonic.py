"""Calls written as a Python list: Llama 4, Llama 3.2, LFM2 and others; OLMo 3 writes a call on each
line between <function_calls> tags.

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

_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_WORD = re.compile(r"[\w.]*", re.ASCII)
_OTHER = re.compile(r"[^\[\](){}'\"\\]*")
_STRING = re.compile(r"[^'\"\\]*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def listed_calls(start: str, end: str) -> ToolFormat:
    """A list of calls, anywhere or between two tags."""
    delimiters = Delimiters("[", start, end)

    def read(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
        is_tagged = False
        while opener := (yield from source.until(delimiters, out.add_text)):
            if opener == "[":
                yield from read_or_text(source, out, "[", _calls(source, out, is_tagged))
            else:
                is_tagged = opener == start

    return ToolFormat(read, (start, end))


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


def _rest_of_list(source: StreamingText, parts: list[str], closer: str = "]") -> Reading[None]:
    """Collect up to the bracket that closes the list, across nested strings and brackets."""
    open_closers = [closer]
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


FORMAT = listed_calls("<|python_start|>", "<|python_end|>")
LFM2 = listed_calls("<|tool_call_start|>", "<|tool_call_end|>")

_LINES, _LINES_END = "<function_calls>", "</function_calls>"


def _read_lines(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    delimiters = Delimiters(_LINES, _LINES_END)
    while opener := (yield from source.until(delimiters, out.add_text)):
        if opener == _LINES:
            yield from read_or_text(source, out, opener, _lines(source, out))


def _lines(source: StreamingText, out: ToolCallWriter) -> Reading[None]:
    """Calls one after another, up to the closing tag."""
    yield from source.spaces()
    while not (yield from source.follows(_LINES_END)):
        parts: list[str] = []
        yield from source.run(_WORD, parts.append)
        if not _NAME.fullmatch("".join(parts)) or (yield from source.need()) != "(":
            raise Malformed
        parts.append(source.take(1))
        yield from _rest_of_list(source, parts, ")")
        for name, arguments in _parsed(f"[{''.join(parts)}]"):
            out.begin_call(name)
            out.add_arguments(arguments)
            out.end_call()
        yield from source.spaces()


OLMO3 = ToolFormat(_read_lines, (_LINES, _LINES_END))
