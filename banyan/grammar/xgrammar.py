"""The xgrammar library. Its compiled form travels as JSON; matching needs no torch."""

import json
import re

import numpy as np
import xgrammar

from banyan.base.errors import RequestError
from banyan.base.json_types import is_object
from banyan.grammar.base import Matcher
from banyan.grammar.json_schema import (
    Schema,
    any_of,
    check_schema,
    conflicting_keyword,
    schemas_in_tag,
    undeclared_required,
    without_type,
)
from banyan.grammar.vocabulary import Encode, Vocabulary
from banyan.messages.requests import EBNF, JSON_SCHEMA, REGEX, Constraint

_QUOTED = re.compile(r'"|\\\\|\\[xunrtfv0]|[\x00-\x1f]')
_SKIPPED_LOOP = re.compile(r"[+*].*\)\?", re.DOTALL)
"""An optional group that begins with a loop, as in (\\d+\\.)?, lets the loop alone pass."""
_HALF = 0xED
"""First byte of U+D000 … U+DFFF in UTF-8; with one of `_SURROGATE` after it no character at all."""
_SURROGATE = range(0xA0, 0xC0)
_QUOTED_FORMATS = ("json-pointer", "relative-json-pointer", "uri-template")


def _unescaped(schema: Schema) -> str:
    """A pattern is matched against the JSON text, so it may not ask for what JSON escapes."""
    if schema.get("format") in _QUOTED_FORMATS:
        return f"the format {schema['format']!r}"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (_QUOTED.search(pattern) or _SKIPPED_LOOP.search(pattern)):
        return "the 'pattern'"
    names = schema.get("patternProperties")
    looped = is_object(names) and any(map(_SKIPPED_LOOP.search, names))
    return "'patternProperties' with an optional group" if looped else ""


def _half_done(schema: Schema) -> str:
    """Keywords that are honoured in some company only; the library itself warns of others."""
    if "multipleOf" in schema and schema.get("type") != "integer":
        return "'multipleOf' of a number"
    if "patternProperties" in schema and "properties" in schema:
        return "'patternProperties' together with 'properties'"
    return "an empty 'anyOf'" if schema.get("anyOf") == [] else ""


_RULES = (
    any_of(
        (
            *("not", "if", "dependencies", "dependentRequired", "dependentSchemas"),
            *("contains", "uniqueItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
        )
    ),
    conflicting_keyword,
    without_type,
    undeclared_required,
    _unescaped,
    _half_done,
)
"""Found by generating from small schemas at random and validating the outcome."""


class XGrammar:
    """Satisfies grammar.base.Backend."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode, whitespace: str | None) -> None:
        self._info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.end_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._writing = _Writing(vocabulary, encode)
        self._whitespace = whitespace

    def compile(self, constraint: Constraint) -> bytes:
        text = constraint.text
        if constraint.kind == JSON_SCHEMA:
            check_schema(text, "xgrammar", _RULES)
            if self._whitespace:
                raise RequestError(
                    "xgrammar has no pattern for white space",
                    hint="Start the server with --grammar-backend llguidance.",
                )
            compiled = self._compiler.compile_json_schema(
                text,
                any_whitespace=self._whitespace is None,
                separators=None if self._whitespace is None else (",", ":"),
            )
        elif constraint.kind == REGEX:
            compiled = self._compiler.compile_regex(text)
        elif constraint.kind == EBNF:
            compiled = self._compiler.compile_grammar(text)
        else:
            for schema in schemas_in_tag(json.loads(text)):
                check_schema(json.dumps(schema), "xgrammar", (_unescaped,))
            compiled = self._compiler.compile_structural_tag(text)
        return compiled.serialize_json().encode()

    def load(self, compiled: bytes) -> "_Program":
        grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info)
        return _Program(grammar, self._writing)


class _Writing:
    """How the model writes, for what the library does not know of it.

    The library lets surrogates pass, which no decoder takes: half a character must not become one.
    Tokens of whole texts never hold them, so only the border between two tokens matters.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.encode = encode
        self.tokens = tokens = vocabulary.tokens
        self.half_ids = frozenset(
            id for id, token in enumerate(tokens) if token[-1:] == bytes([_HALF])
        )
        wrong = [id for id, token in enumerate(tokens) if token and token[0] in _SURROGATE]
        self.wrong_ids = frozenset(wrong)
        self.right = ~vocabulary.bits(wrong)


class _Program:
    def __init__(self, grammar: xgrammar.CompiledGrammar, writing: _Writing) -> None:
        self._grammar = grammar
        self._writing = writing
        self.size_bytes = grammar.memory_size_bytes

    def start(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._grammar), self._writing)


class _Matcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher, writing: _Writing) -> None:
        self._matcher = matcher
        self._writing = writing
        self._tokens: list[int] = []
        self.problem = ""

    def fill(self, mask: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(mask[None])
        if self._is_half:
            mask &= self._writing.right

    def forced(self) -> list[int]:
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:
            return []  # it begins within a character, which the library takes for a text
        if len(text) < 2 or self._is_half:
            return []
        tokens = self._writing.encode(text)[:-1]
        written = b"".join(self._writing.tokens[token] for token in tokens)
        return tokens if text.encode().startswith(written) else []

    def accept(self, token: int) -> bool:
        if self._is_half and token in self._writing.wrong_ids:
            return False
        if not self._matcher.accept_token(token):
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._tokens[len(self._tokens) - count :]

    def is_complete(self) -> bool:
        return self._matcher.is_completed()

    @property
    def _is_half(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._writing.half_ids
