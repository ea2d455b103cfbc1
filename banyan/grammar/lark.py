"""Structural tags in the Lark notation of llguidance: free text in which a trigger starts a part
that is constrained. A rule is written for every node of the tag's format.
"""

import json
from collections.abc import Callable, Mapping

import llguidance

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object

_TEXT = r"TEXT: /(.|\n)*/"

Format = Mapping[str, object]


def lark_of(structural_tag: str) -> str:
    """The grammar of {"type": "structural_tag", "format": …}.

    Raises:
        RequestError: a format is malformed or of a kind that has no counterpart.
    """
    form = json.loads(structural_tag).get("format")
    rules = _Rules()
    start = rules.of(form)
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines, _TEXT])


class _Rules:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, form: object) -> str:
        """An expression that stands for `form`; longer ones become rules of their own."""
        if not is_object(form):
            raise RequestError(f"a format must be an object, got {type(form).__name__}")
        write = _KINDS.get(str(form.get("type")))
        if write is None:
            raise RequestError(
                f"llguidance has no counterpart of the format {str(form.get('type'))[:40]!r}",
                hint=f"Use {', '.join(_KINDS)}, or --grammar-backend xgrammar.",
            )
        return write(self, form)

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name


def _literal(rules: _Rules, form: Format) -> str:
    return _quoted(form.get("value"))


def _schema(rules: _Rules, form: Format) -> str:
    if form.get("style", "json") != "json":
        raise RequestError(f"llguidance writes JSON only, not {str(form['style'])[:40]!r}")
    schema = form.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise RequestError("a json_schema format must have a json_schema")
    return rules.rule(f"%json {json.dumps({} if schema is True else schema)}")


def _regex(rules: _Rules, form: Format) -> str:
    pattern = form.get("pattern")
    if not isinstance(pattern, str):
        raise RequestError("a regex format must have a pattern")
    return rules.rule(f"/{llguidance.regex_to_lark(pattern)}/")


def _text(rules: _Rules, form: Format) -> str:
    if form.get("excludes"):
        raise RequestError("llguidance has no counterpart of any_text with excludes")
    return "TEXT"


def _sequence(rules: _Rules, form: Format) -> str:
    return rules.rule(" ".join(rules.of(part) for part in _list(form, "elements")))


def _choice(rules: _Rules, form: Format) -> str:
    return rules.rule(" | ".join(rules.of(part) for part in _list(form, "elements")))


def _repeated(mark: str) -> Callable[[_Rules, Format], str]:
    return lambda rules, form: rules.rule(f"({rules.of(form.get('content'))}){mark}")


def _tag(rules: _Rules, form: Format) -> str:
    return rules.rule(f"{_quoted(form.get('begin'))} {_rest(rules, form)}")


def _rest(rules: _Rules, tag: Format) -> str:
    """Content and end of a tag."""
    content, end = tag.get("content"), tag.get("end")
    ends = [_quoted(e) for e in (end if is_list(end) else [end])]
    if is_object(content) and content.get("type") == "any_text" and any(ends):
        return rules.rule(" | ".join(rules.rule(f"TEXT {e}", "[lazy]") for e in ends))
    return rules.rule(f"{rules.of(content)} ({' | '.join(ends)})")


def _triggered(rules: _Rules, form: Format) -> str:
    tags = [tag for tag in _list(form, "tags") if is_object(tag)]
    begins = [tag.get("begin") for tag in tags]
    rests = [_rest(rules, tag) for tag in tags]
    marked: list[str] = []
    for trigger in _list(form, "triggers"):
        if not isinstance(trigger, str) or not trigger:
            raise RequestError("triggers must be texts of at least one character")
        started = [
            f"{_quoted(begin[len(trigger) :])} {rest}"
            for begin, rest in zip(begins, rests, strict=True)
            if isinstance(begin, str) and begin.startswith(trigger)
        ]
        if started:
            free = rules.rule(f"TEXT {_quoted(trigger)}", "[lazy]")
            marked.append(rules.rule(f"{free} ({' | '.join(started)})"))
    part = rules.rule(" | ".join(marked))
    first = rules.rule(" | ".join(f"{_quoted(b)} {r}" for b, r in zip(begins, rests, strict=True)))
    if form.get("stop_after_first"):
        return first if form.get("at_least_one") else rules.rule(f"{part} | TEXT")
    more = f"({part})* TEXT"
    return rules.rule(f"{first} {more}" if form.get("at_least_one") else more)


def _separated(rules: _Rules, form: Format) -> str:
    tag = rules.rule(" | ".join(rules.of(tag) for tag in _list(form, "tags")))
    more = "" if form.get("stop_after_first") else f" ({_quoted(form.get('separator'))} {tag})*"
    return rules.rule(f"{tag}{more}" if form.get("at_least_one") else f"({tag}{more})?")


_KINDS: Mapping[str, Callable[[_Rules, Format], str]] = {
    "const_string": _literal,
    "json_schema": _schema,
    "regex": _regex,
    "any_text": _text,
    "sequence": _sequence,
    "or": _choice,
    "optional": _repeated("?"),
    "plus": _repeated("+"),
    "star": _repeated("*"),
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}


def _list(form: Format, name: str) -> list[object]:
    found = form.get(name)
    if not is_list(found) or not found:
        raise RequestError(f"{form.get('type')}.{name} must be a list that is not empty")
    return found


def _quoted(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"begin, end and value must be texts, got {type(text).__name__}")
    return json.dumps(text)
