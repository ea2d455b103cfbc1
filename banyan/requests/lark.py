"""Lark grammars as regular expressions: the form that strings inside a JSON schema can have.

Rules and terminals that do not contain themselves are written out in place. What has no such form
is refused by its name. Source: the grammar reference of Lark.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from banyan.base.errors import RequestError

MAX_CHARS = 32 << 10
"""Of the whole expression. A rule may double at each use."""
MAX_NESTING = 64

COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"(?:[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals of Lark's own library `common`."""

_LINE = re.compile(
    r"(?P<name>[?!]*_?[A-Za-z]\w*)(?P<templates>\{[^}]*\})?(?:\.-?\d+)?[ \t]*:|%(?P<order>\w+)",
    re.ASCII,
)
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)"""
    r"""|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<name>[?!]?_?[A-Za-z]\w*)"""
    r"""|(?P<alias>->\s*\w+)|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<mark>\.\.|[|()\[\]?*+])""",
    re.ASCII,
)
_IMPORT = re.compile(
    r"\s*common\s*(?:\.\s*(?P<one>\w+)\s*(?:->\s*(?P<alias>\w+))?|\((?P<several>[\w\s,]+)\))\s*",
    re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_META = frozenset("\\.+*?()|[]{}^$/")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}
_UNITS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)+\]|[^\\]", re.DOTALL)

Token = tuple[str, str]


def regex_of_lark(grammar: str) -> str:
    """The regular expression of the texts that `start` stands for.

    Raises:
        RequestError: 400; it is malformed, or no regular expression says the same.
    """
    return _Grammar(grammar).of("start", ())


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"the lark grammar is not taken: {why}", param="tools", code="unsupported_grammar"
    )


class _Grammar:
    """The definitions of a grammar, and their expressions as far as they were needed."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[Token]] = {}
        self._known: dict[str, str] = {}
        self._at: list[Token] = []
        """What is left to read of the current definition, the next last."""
        for name, body in _definitions(text):
            if name == "%import":
                self._import(body)
            elif name.startswith("%"):
                raise _refusal(f"{name} has no counterpart")
            elif name in self._bodies:
                raise _refusal(f"{name!r} is defined twice")
            else:
                self._bodies[name] = list(_tokens(body, name))

    def of(self, name: str, within: Sequence[str]) -> str:
        """The expression of a rule or terminal that is used within others."""
        if name in within:
            way = " → ".join((*within[within.index(name) :], name))
            raise _refusal(f"{name!r} contains itself ({way}), which needs a stack")
        if name not in self._known:
            if name not in self._bodies:
                raise _refusal(f"{name!r} is not defined")
            if len(within) > MAX_NESTING:
                raise _refusal(f"rules are nested more than {MAX_NESTING} deep")
            before, self._at = self._at, self._bodies[name][::-1]
            found = self._alternatives((*within, name))
            if self._at:
                raise _refusal(f"{self._at[-1][1]!r} is not expected in {name!r}")
            self._at = before
            self._known[name] = found
        return self._known[name]

    def _import(self, body: str) -> None:
        found = _IMPORT.fullmatch(body)
        names = [found["one"]] if found and found["one"] else []
        names += re.findall(r"\w+", found["several"]) if found and found["several"] else []
        if not found or not names:
            raise _refusal(f"%import{body[:60].rstrip()}: only common is there to import from")
        for name in names:
            if name not in COMMON:
                raise _refusal(f"common.{name} is not known here")
            self._known[found["alias"] or name] = COMMON[name]

    def _next_is(self, *marks: str) -> bool:
        return bool(self._at) and self._at[-1][0] == "mark" and self._at[-1][1] in marks

    def _alternatives(self, within: Sequence[str], depth: int = 0) -> str:
        if depth > MAX_NESTING:
            raise _refusal(f"groups are nested more than {MAX_NESTING} deep")
        found = [self._sequence(within, depth)]
        while self._next_is("|"):
            self._at.pop()
            found.append(self._sequence(within, depth))
        whole = found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
        if len(whole) > MAX_CHARS:
            raise _refusal(f"{within[-1]!r} takes more than {MAX_CHARS} characters written out")
        return whole

    def _sequence(self, within: Sequence[str], depth: int) -> str:
        found: list[str] = []
        while self._at and not self._next_is("|", ")", "]"):
            if self._at[-1][0] == "alias":
                self._at.pop()
                continue
            item = self._atom(within, depth)
            while self._at and (self._next_is("?", "*", "+") or self._at[-1][0] == "times"):
                kind, text = self._at.pop()
                if kind == "times":
                    bounds = re.findall(r"\d+", text)
                    if any(len(bound) > 4 for bound in bounds):
                        raise _refusal(f"{text} repeats too often")
                    text = "{" + ",".join(bounds) + "}"
                item = _one(item) + text
            found.append(item)
        return "".join(found)

    def _atom(self, within: Sequence[str], depth: int) -> str:
        kind, text = self._at.pop()
        if kind == "name":
            return self.of(text.lstrip("?!"), within)
        if kind == "regex":
            return _of_regex(text)
        if kind == "text":
            if not self._next_is(".."):
                return _of_text(text)
            self._at.pop()
            last = self._at.pop() if self._at else ("", "")
            ends = [_unquoted(text), _unquoted(last[1]) if last[0] == "text" else ""]
            if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
                raise _refusal(f"{text}..{last[1]} is no range of characters")
            return "[" + "-".join(rf"\{e}" if e in r"\]^-[" else _escaped(e) for e in ends) + "]"
        if text in ("(", "["):
            inner = self._alternatives(within, depth + 1)
            if not self._next_is({"(": ")", "[": "]"}[text]):
                raise _refusal(f"{text!r} is not closed in {within[-1]!r}")
            self._at.pop()
            return inner if text == "(" else _one(inner) + "?"
        raise _refusal(f"{text!r} is not expected in {within[-1]!r}")


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    """(name or %order, what follows) of each definition. One goes on over several lines."""
    name, body = "", list[str]()
    for line in text.splitlines():
        bare = line.strip()
        begins = _LINE.match(bare)
        if begins is None:
            if bare and not bare.startswith(("//", "#")) and not name:
                raise _refusal(f"{bare[:60]!r} is no definition")
            body.append(bare)
            continue
        if name:
            yield name, "\n".join(body)
        if begins["templates"]:
            raise _refusal(f"{begins[0]!r}: templates have no counterpart")
        name = f"%{begins['order']}" if begins["order"] else begins["name"].lstrip("?!")
        body = [bare[begins.end() :]]
    if name:
        yield name, "\n".join(body)


def _tokens(body: str, name: str) -> Iterator[Token]:
    at = 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None or found.lastgroup is None:
            raise _refusal(f"{body[at : at + 40]!r} is not understood in {name!r}")
        if found.lastgroup != "space":
            yield found.lastgroup, found[0]
        at = found.end()


def _unquoted(text: str) -> str:
    """The characters of a quoted text."""

    def plain(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        return chr(int(code, 16)) if code else _ESCAPED.get(found[3], found[3])

    return _ESCAPE.sub(plain, text.removesuffix("i")[1:-1])


def _of_text(text: str) -> str:
    found = _unquoted(text)
    if not text.endswith("i"):
        return "".join(map(_escaped, found))
    pairs = ((c.lower(), c.upper()) for c in found)
    return "".join(
        _escaped(low) if low == high else f"(?:{_escaped(low)}|{_escaped(high)})"
        for low, high in pairs
    )


def _of_regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    flags = flags.replace("u", "")
    if set(flags) - set("is"):
        raise _refusal(f"{text[:60]}: of the flags, i, s and u are taken")
    pattern = pattern.replace(r"\/", "/")
    return f"(?{flags}:{pattern})" if flags else f"(?:{pattern})" if "|" in pattern else pattern


def _escaped(char: str) -> str:
    return rf"\{char}" if char in _META else _CONTROLS.get(char, char)


def _one(expression: str) -> str:
    """The expression as one unit, which a repetition can follow."""
    is_group = expression.startswith("(?:") and _closes(expression)
    is_unit = _UNITS.fullmatch(expression) is not None
    return expression if is_group or is_unit else f"(?:{expression})"


def _closes(expression: str) -> bool:
    """Whether the group that begins an expression ends it."""
    depth = 0
    in_class = False
    units = re.findall(r"\\.|.", expression, re.DOTALL)
    for index, unit in enumerate(units):
        if in_class:
            in_class = unit != "]"
        elif unit == "[":
            in_class = True
        elif unit in "()":
            depth += 1 if unit == "(" else -1
            if not depth:
                return index == len(units) - 1
    return False
