"""The llguidance library. It compiles in milliseconds and works lazily under limits of its own, so
its compiled form is the grammar in the library's notation. `lark_of` writes structural tags in that
notation: free text in which a trigger starts a constrained part.
"""

import json
from collections.abc import Callable, Mapping
from typing import cast

import llguidance
import numpy as np

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger, printable
from banyan.grammar.base import Matcher
from banyan.grammar.json_schema import (
    WHITESPACE_LIMIT,
    Schema,
    check_schema,
    without_unknown_formats,
)
from banyan.grammar.vocabulary import Encode, Vocabulary
from banyan.messages.requests import EBNF, JSON_SCHEMA, REGEX, Constraint

log = logger(__name__)

_MAX_LEXER_STATES = 50_000
"""A lexer state takes 1 to 2 kB; the other limits are the library's own."""


_PROBED_TOKENS = 64
"""How far what must come first is followed when a constraint is compiled."""

_WAYS_OUT = (
    ('"uniqueItems"', "", "Leave uniqueItems out; in pydantic, write list[…] for set[…]"),
    (
        "NoExtensionBias",
        "it allows no value that ends: it refers to itself alone",
        "Give it a branch without the reference",
    ),
    ("Unimplemented keys", "", "Leave them out of the schema"),
    (" items; max is", "", "Ask for fewer optional properties, or fewer alternatives"),
    (
        "'coerce_one_of'",
        "oneOf is supported only where no value fits two of its branches",
        "Write anyOf, or give each branch a property with a const of its own",
    ),
)
"""What a reason has in it, what to say in its place ("" = the reason), and what to do about it."""


def _repeated_keys(schema: Schema) -> str:
    """Additional members may repeat a name, and then count twice."""
    least, more = schema.get("minProperties"), schema.get("additionalProperties")
    may_repeat = isinstance(least, int) and least > 1 and more is not False
    return "'minProperties' above 1" if may_repeat else ""


class LLGuidance:
    """Satisfies grammar.base.Backend."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode, whitespace: str | None) -> None:
        self._tokens = llguidance.LLTokenizer(
            cast(llguidance.TokenizerWrapper, _Tokens(vocabulary, encode)),
            eos_token=list(vocabulary.end_ids),
        )
        if whitespace is None:
            whitespace = rf"[\x20\x0A\x0D\x09]{{1,{WHITESPACE_LIMIT}}}"
        self._whitespace = whitespace
        self._ways = _Ways(vocabulary)

    def compile(self, constraint: Constraint) -> bytes:
        grammar = self._grammar(constraint)
        matcher = self._matcher(grammar)
        matcher.compute_bitmask()
        _refuse_error(matcher)
        self._follow(matcher)
        return grammar.encode()

    def _follow(self, matcher: llguidance.LLMatcher) -> None:
        """Write what every output begins with: RequestError when the library cannot follow it.

        Some of its limits are met there only; a limit after a choice ends the answer that makes
        the choice.
        """
        for _ in range(_PROBED_TOKENS):
            matcher.consume_tokens(matcher.compute_ff_tokens())
            ways = self._ways.out_of(matcher.compute_bitmask())
            _refuse_error(matcher)
            if not ways:
                return
            after = matcher
            for way in ways:
                after = matcher.deep_copy()
                after.consume_token(way)
                if not after.is_error():
                    break
            _refuse_error(after)
            if len(ways) > 1:
                return
            matcher = after

    def load(self, compiled: bytes) -> "_Program":
        matcher = self._matcher(compiled.decode())
        _refuse_error(matcher)
        return _Program(matcher, len(compiled))

    def _grammar(self, constraint: Constraint) -> str:
        text = constraint.text
        if constraint.kind == JSON_SCHEMA:
            text = json.dumps(without_unknown_formats(json.loads(text)))
            check_schema(text, "llguidance", (_repeated_keys,))
            pattern = self._whitespace
            return llguidance.LLMatcher.grammar_from_json_schema(
                text,
                overrides={"whitespace_pattern": pattern}
                if pattern
                else {"whitespace_flexible": False},
            )
        if constraint.kind == REGEX:
            return llguidance.LLMatcher.grammar_from_regex(text)
        if constraint.kind == EBNF:
            return llguidance.grammar_from("ebnf", text)
        return llguidance.LLMatcher.grammar_from_lark(lark_of(text))

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        return llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)


class _Ways:
    """Tokens that stand for all those with which an output may go on."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._first = np.array([t[0] if t else 0 for t in vocabulary.tokens], dtype=np.uint8)
        self._is_text = ~np.isin(self._first, list(b"\0 \t\r\n"))
        self._is_text[list(vocabulary.end_ids)] = False
        self._len = np.array([len(t) for t in vocabulary.tokens])

    def out_of(self, mask: bytes) -> list[int]:
        """The shortest token of each first byte that `mask` allows, but white space."""
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        ids = np.flatnonzero(bits[: len(self._first)] & self._is_text)
        ids = ids[np.argsort(self._len[ids], kind="stable")]
        _, at = np.unique(self._first[ids], return_index=True)
        return ids[at].tolist()


class _Tokens:
    """The vocabulary in the form that LLTokenizer takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.end_ids[0]
        self.special_token_ids: list[int] = []
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        """Forced text is kept to the model's own tokens, which it has seen in training."""
        return self._encode(text if isinstance(text, str) else text.decode())


def _refuse_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(_reason(matcher))


def _reason(matcher: llguidance.LLMatcher) -> str:
    text = matcher.get_error().partition("\n<state>")[0]
    text = printable(text.removesuffix("\n<non-verbose/>").partition("; consider making")[0], 400)
    return next((f"{shown or text}. {do}" for sign, shown, do in _WAYS_OUT if sign in text), text)


class _Program:
    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.size_bytes = 50 * num_bytes
        """The library gives no size; measured on the schemas of its own benchmark."""

    def start(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy())


class _Matcher:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def problem(self) -> str:
        """Some of its limits are met only as the output grows."""
        return _reason(self._matcher) if self._matcher.is_error() else ""

    def fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            log.warning("grammar stopped: %s", printable(self._matcher.get_error()))
            mask[:] = 0

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def accept(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def is_complete(self) -> bool:
        return self._matcher.is_accepting()


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
    if not is_object(schema) and not isinstance(schema, bool):
        raise RequestError("a json_schema format must have a json_schema")
    known = without_unknown_formats({} if schema is True else schema)
    return rules.rule(f"%json {json.dumps(known)}")


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
