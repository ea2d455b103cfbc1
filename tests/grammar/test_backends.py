"""Every backend behind the same protocol: what it allows, what it refuses, and the laws of undo."""

import importlib.util
import json
import re
from functools import cache
from random import Random

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import RequestError
from banyan.grammar.base import Backend, masks_for, stand_ins
from banyan.grammar.constrained import AnyText, Constrained
from banyan.messages.requests import EBNF, FREE, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Constraint
from banyan.requests.constraint import Tag, tool_calls_constraint
from tests.grammar.play import (
    END,
    MASKS,
    TOOL,
    VOCABULARY,
    allowed,
    open_backend,
    play,
    started,
    text_of,
    write,
)
from tests.support.flags import config_of

PACKAGES = {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines_core"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": [1]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def backend_or_skip(name: str, whitespace: str | None = None) -> Backend:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    return open_backend(name, whitespace)


@pytest.fixture(scope="module", params=PACKAGES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_or_skip(request.param)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def full_backend(request: pytest.FixtureRequest) -> Backend:
    """One that has grammars and structural tags."""
    return backend_or_skip(request.param)


def test_an_output_ends_where_it_matches_and_nowhere_else(backend: Backend):
    grammar = started(backend, REGEX, "ab?")
    assert END not in allowed(grammar) and not grammar.accept(END)
    assert write(grammar, "a")
    assert END in allowed(grammar) and not grammar.is_ended
    assert grammar.accept(END) and grammar.is_ended
    assert allowed(grammar) == [END]
    assert not grammar.accept(ord("b"))


def test_half_a_character_never_becomes_a_surrogate(full_backend: Backend):
    grammar = started(full_backend, JSON_SCHEMA, '{"type":"string","maxLength":2}')
    assert write(grammar, '"') and grammar.accept(0xED)
    assert not set(allowed(grammar)) & set(range(0xA0, 0xC0)) and not grammar.accept(0xA0)
    assert all(grammar.accept(token) for token in b"\x9f\xbf\xed")
    grammar.rollback(1)
    assert write(grammar, '퀀"')


def test_an_optional_group_that_begins_with_a_loop_is_whole_or_absent(backend: Backend):
    schema = json.dumps({"type": "string", "pattern": "^x(a+b)?c$"})
    try:
        grammar = started(backend, JSON_SCHEMA, schema)
    except RequestError as error:
        assert "pattern" in error.text
    else:
        assert write(grammar, '"xa') and not write(grammar, "c")


@pytest.mark.parametrize("text", ["forced to the end", "forced or not"])
def test_forced_tokens_are_allowed_and_the_only_text(full_backend: Backend, text: str):
    grammar = started(full_backend, REGEX, f"({text})|forcing")
    assert grammar.accept(ord("f"))
    assert "orc".startswith(text_of(grammar.forced()))
    assert write(grammar, "orced ")
    rest = grammar.forced()
    assert rest and text[7:].startswith(text_of(rest))
    assert all(grammar.accept(token) for token in rest)


def test_what_is_forced_may_begin_within_a_character(full_backend: Backend):
    grammar = started(full_backend, REGEX, "(éééé)|x")
    assert grammar.accept("é".encode()[0])
    forced = b"".join(VOCABULARY.tokens[token] for token in grammar.forced())
    assert "éééé".encode()[1:].startswith(forced) and not grammar.problem
    assert all(grammar.accept(token) for token in "éééé".encode()[1:])
    assert END in allowed(grammar)


class Broken:
    """A library that fails at one question, and knows nothing at the others."""

    problem = ""

    def __init__(self, question: str) -> None:
        self._question = question

    def _asked(self, question: str) -> None:
        if question == self._question:
            raise RuntimeError("the library is at a loss")

    def fill(self, mask: np.ndarray) -> None:
        self._asked("fill")
        mask[:] = -1

    def forced(self) -> list[int]:
        self._asked("forced")
        return []

    def accept(self, token: int) -> bool:
        self._asked("accept")
        return True

    def is_complete(self) -> bool:
        return False


@pytest.mark.parametrize("question", ["fill", "forced", "accept"])
def test_a_library_that_fails_gives_up_its_own_constraint(question: str):
    grammar = Constrained(Broken(question), MASKS, MASKS.text(Constraint(REGEX, "ab")))
    may, forced, is_taken = any(grammar.mask()), grammar.forced(), grammar.accept(5)
    assert "the library is at a loss" in grammar.problem
    assert (may, forced, is_taken) == (question != "fill", [], False)
    assert not any(grammar.mask()) and not grammar.accept(5)


def test_nothing_is_forced_before_the_beginning_and_after_the_end(full_backend: Backend):
    grammar = started(full_backend, REGEX, "ab", after=[TOOL])
    assert grammar.forced() == [] and grammar.accept(ord("x")) and grammar.accept(TOOL)
    assert write(grammar, "ab") and grammar.forced() == []
    assert grammar.accept(END) and grammar.forced() == []


def test_a_token_that_is_not_allowed_moves_nothing(backend: Backend):
    grammar = started(backend, REGEX, "yes|no")
    before = grammar.mask()
    assert not grammar.accept(ord("q"))
    assert grammar.mask() == before
    assert write(grammar, "no")


def test_every_token_of_a_mask_is_accepted(backend: Backend):
    for spot in ("", "{", '{"name"'):
        grammar = started(backend, JSON_SCHEMA, json.dumps(PERSON))
        assert write(grammar, spot)
        may = set(allowed(grammar))
        assert may
        for token in may:
            assert grammar.accept(token), (spot, text_of([token]))
            grammar.rollback(1)


def test_random_outputs_of_a_schema_are_valid(backend: Backend):
    random, ended = Random(5), 0
    for _ in range(20):
        played = play(started(backend, JSON_SCHEMA, json.dumps(PERSON)), random)
        assert not played.is_stuck
        if played.is_ended:
            ended += 1
            jsonschema.validate(json.loads(played.text), PERSON)
    assert ended > 5


@pytest.mark.parametrize("is_tagged", [False, True], ids=["schema", "tool call"])
@pytest.mark.parametrize(
    "pattern", [r"a\nb", "a\nb", r"a\tb", r'["x]{2}', r"x\\y", "a.b", "[^x]y", r"a\sb"]
)
def test_a_pattern_of_what_json_escapes_is_refused_or_gives_json(
    backend: Backend, pattern: str, is_tagged: bool
):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": f"^{pattern}$"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    kind, text = JSON_SCHEMA, json.dumps(schema)
    if is_tagged:
        asked = Constraint.decode(tool_calls_constraint([Tag("<", schema, ">")], ()))
        kind, text = asked.kind, asked.text
    try:
        matching = [started(backend, kind, text) for _ in range(12)]
    except RequestError:
        return
    for seed, grammar in enumerate(matching):
        played = play(grammar, Random(seed), most=80)
        if played.is_ended:
            found = json.loads(played.text.split(">")[0].lstrip("<"))
            assert re.fullmatch(pattern, found["a"]), played.text


def test_any_object_is_an_object(full_backend: Backend):
    assert write(started(full_backend, JSON_SCHEMA, '{"type":"object"}'), '{"a":[1,{"b":null}]}')
    assert not write(started(full_backend, JSON_SCHEMA, '{"type":"object"}'), "[")


@pytest.mark.parametrize("name", PACKAGES)
def test_compact_json_has_no_white_space(name: str):
    random = Random(7)
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"const": "x"}}}
    flags = config_of("--constrained-json-disable-any-whitespace")
    backend = backend_or_skip(name, whitespace=flags.grammar.between_tokens)
    played = [play(started(backend, JSON_SCHEMA, json.dumps(schema)), random) for _ in range(8)]
    assert any(p.is_ended for p in played)
    assert not any(c.isspace() for p in played for c in p.text)


SPACED = ("--constrained-json-whitespace-pattern", r"[\n]{0,3}")


@pytest.mark.parametrize("name", ["llguidance", "outlines"])
def test_white_space_in_json_follows_the_pattern(name: str):
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"const": "x"}}}
    backend = backend_or_skip(name, config_of(*SPACED).grammar.between_tokens)
    random = Random(7)
    played = [play(started(backend, JSON_SCHEMA, json.dumps(schema)), random) for _ in range(8)]
    assert any(p.is_ended for p in played)
    text = "".join(p.text for p in played)
    assert "\n" in text and not any(c.isspace() for c in text if c != "\n")
    assert "\n\n\n\n" not in text


def test_xgrammar_leaves_a_pattern_of_white_space_to_the_backend_that_stands_in():
    backend = backend_or_skip("xgrammar", config_of(*SPACED).grammar.between_tokens)
    with pytest.raises(RequestError, match="has no pattern for white space"):
        started(backend, JSON_SCHEMA, json.dumps(PERSON))
    started(backend, REGEX, "a+")
    assert stand_ins("xgrammar")[-1] == "llguidance"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), undone=st.lists(st.integers(0, 6), max_size=6))
@pytest.mark.parametrize("name", PACKAGES)
def test_undoing_gives_back_every_mask_before(name: str, seed: int, undone: list[int]):
    random = Random(seed)
    grammar = started(_cached(name), JSON_SCHEMA, json.dumps(PERSON))
    masks = [grammar.mask()]
    for count in (*undone, 0):
        for _ in range(random.randrange(1, 8)):
            choices = allowed(grammar)
            assert grammar.accept(random.choice(choices))
            masks.append(grammar.mask())
        count = min(count, len(masks) - 1)
        grammar.rollback(count)
        del masks[len(masks) - count :]
        assert grammar.mask() == masks[-1]
        assert (
            grammar.is_ended == (allowed(grammar) == [END] and not grammar.accept(ord("x")))
            or not grammar.is_ended
        )


def test_drafts_get_a_mask_each_and_leave_no_trace(backend: Backend):
    grammar = started(backend, REGEX, "(a|z)(b|z)(c|z)(d|z)")
    before = grammar.mask()
    size = len(before)
    bits = masks_for(grammar, [ord("a"), ord("b"), ord("x"), ord("d")])
    assert len(bits) == 5 * size and grammar.mask() == before
    follow = started(backend, REGEX, "(a|z)(b|z)(c|z)(d|z)")
    for i, letter in enumerate("ab"):
        assert bits[i * size : (i + 1) * size] == follow.mask()
        assert write(follow, letter)
    assert bits[2 * size : 3 * size] == follow.mask()


def test_drafts_that_branch_get_the_mask_of_what_leads_to_them(backend: Backend):
    pattern = "ab(c|d)e|axyz|(q|r)t"
    grammar = started(backend, REGEX, pattern)
    before = grammar.mask()
    size = len(before)
    letters, parents = "abxcdyqsz", [-1, 0, 0, 1, 1, 2, -1, 0, 7]
    bits = masks_for(grammar, [ord(letter) for letter in letters], parents)
    assert grammar.mask() == before == bits[:size]
    above = ["a", "ab", "ax", "abc", "abd", "axy", "q", "a", "a"]  # s and z are not allowed there
    for at, text in enumerate(above, 1):
        if letters[at - 1] in "sz":
            continue
        follow = started(backend, REGEX, pattern)
        assert write(follow, text)
        assert bits[at * size : (at + 1) * size] == follow.mask(), text


def test_a_constraint_that_begins_after_the_thinking_leaves_it_free(backend: Backend):
    grammar = started(backend, REGEX, "ok", after=(10, 10))
    assert TOOL in allowed(grammar) and END not in allowed(grammar)
    for token in (ord("x"), 10, TOOL, 10):
        assert grammar.accept(token) and not grammar.accept(END)
    assert ord("z") in allowed(grammar)
    assert grammar.accept(10)
    assert ord("o") in allowed(grammar) and ord("z") not in allowed(grammar)
    assert write(grammar, "ok") and grammar.accept(END)
    grammar.rollback(3)
    assert write(grammar, "ok")
    grammar.rollback(3)
    assert ord("z") in allowed(grammar), "the border itself is undone"


def free(after: tuple[int, ...], budget: int, opening: tuple[int, ...] = ()) -> Constrained:
    constraint = Constraint(FREE, "", after, budget, opening)
    return Constrained(AnyText(), MASKS, MASKS.text(constraint), after, budget, opening)


def test_thinking_that_uses_up_its_budget_is_ended():
    grammar = free((10, 11, 12), budget=3)
    for token in (ord("x"), TOOL, ord("y")):
        assert TOOL in allowed(grammar) and grammar.forced() == []
        assert grammar.accept(token)
    assert grammar.forced() == [10, 11, 12]
    for token in (10, 11, 12):
        assert allowed(grammar) == [token] and not grammar.accept(ord("x"))
        assert grammar.accept(token)
    assert END in allowed(grammar) and TOOL in allowed(grammar) and grammar.forced() == []
    assert grammar.accept(TOOL) and grammar.accept(END) and grammar.is_ended
    grammar.rollback(3)
    assert allowed(grammar) == [12] and not grammar.is_ended
    grammar.rollback(3)
    assert ord("z") in allowed(grammar), "the budget's last token is undone"


def test_an_end_that_has_begun_within_the_budget_goes_on():
    grammar = free((10, 11, 12), budget=3)
    for token in (ord("x"), 10, 11):
        assert grammar.accept(token)
    assert grammar.forced() == [12] and allowed(grammar) == [12]


def test_thinking_that_ends_by_itself_has_no_forced_end():
    grammar = free((10, 11), budget=4)
    for token in (ord("x"), 10, 11, *b"a long answer"):
        assert grammar.accept(token) and grammar.forced() == []


def test_a_budget_is_for_an_output_that_begins_with_thinking():
    grammar = free((10, 11), budget=3, opening=(5, 6))
    for token in b"an answer without thinking":
        assert grammar.accept(token) and grammar.forced() == []
    assert END in allowed(grammar)
    thinks = free((10, 11), budget=3, opening=(5, 6))
    for token in (5, 6, 9):
        assert thinks.accept(token)
    assert thinks.forced() == [10, 11]


def test_a_special_token_is_allowed_only_where_the_constraint_names_it(full_backend: Backend):
    assert TOOL not in allowed(started(full_backend, REGEX, ".+"))
    assert TOOL in allowed(started(full_backend, REGEX, "<tool>.+"))


def test_a_grammar_in_gbnf_is_followed(full_backend: Backend):
    text = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | root'
    assert write(started(full_backend, EBNF, text), "[1,[22,[3]]]")
    assert not write(started(full_backend, EBNF, text), "[1,]")


def tool_calls(at_least_one: bool, parallel: bool) -> Constraint:
    tags = [
        Tag('<tool>{"name": "add", "arguments": ', {"const": 1}, "}</tool>"),
        Tag('<tool>{"name": "sub", "arguments": ', {"const": 2}, "}</tool>"),
    ]
    triggers = [] if at_least_one else ["<tool>"]
    encoded = tool_calls_constraint(tags, triggers, parallel=parallel)
    return Constraint.decode(encoded)


ADD = '<tool>{"name": "add", "arguments": 1}</tool>'
SUB = '<tool>{"name": "sub", "arguments": 2}</tool>'


@pytest.mark.parametrize(
    ("at_least_one", "parallel", "output", "is_whole"),
    [
        (False, True, "just text", True),
        (False, True, f"text {ADD}", True),
        (False, True, f"text {ADD} more {SUB}", True),
        (False, True, '<tool>{"name": "add", "arguments": 1', False),
        (True, True, ADD, True),
        (True, True, f"{ADD}\n{SUB}", True),
        (True, False, SUB, True),
        (False, False, f"text {SUB}", True),
    ],
)
def test_tool_calls_are_constrained_from_their_trigger_on(
    full_backend: Backend, at_least_one: bool, parallel: bool, output: str, is_whole: bool
):
    constraint = tool_calls(at_least_one, parallel)
    grammar = started(full_backend, STRUCTURAL_TAG, constraint.text)
    assert write(grammar, output)
    assert (END in allowed(grammar)) == is_whole


@pytest.mark.parametrize(
    ("at_least_one", "parallel", "output"),
    [
        (False, True, '<tool>{"name": "m'),
        (False, True, '<tool>{"name": "add", "arguments": 2'),
        (True, True, "t"),
        (True, False, f"{ADD}<"),
        (False, False, f"{SUB}x"),
    ],
)
def test_a_wrong_tool_call_is_not_allowed(
    full_backend: Backend, at_least_one: bool, parallel: bool, output: str
):
    constraint = tool_calls(at_least_one, parallel)
    grammar = started(full_backend, STRUCTURAL_TAG, constraint.text)
    assert write(grammar, output[:-1]) and not write(grammar, output[-1])


def test_the_marker_of_a_tool_call_may_be_one_special_token(full_backend: Backend):
    grammar = started(full_backend, STRUCTURAL_TAG, tool_calls(True, False).text)
    assert grammar.accept(TOOL)
    assert write(grammar, ADD.removeprefix("<tool>"))


def test_a_plain_sequence_of_formats_is_the_same_in_both_notations(full_backend: Backend):
    form = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a/"},
            {"type": "optional", "content": {"type": "regex", "pattern": "b{2}"}},
            {"type": "or", "elements": [{"type": "const_string", "value": c} for c in "xy"]},
            {"type": "tag", "begin": "<q>", "content": {"type": "any_text"}, "end": "</q>"},
        ],
    }
    text = json.dumps({"type": STRUCTURAL_TAG, "format": form})
    for output in ("a/x<q></q>", "a/bby<q>any < text</q>"):
        grammar = started(full_backend, STRUCTURAL_TAG, text)
        assert write(grammar, output) and allowed(grammar) == [END]
    assert not write(started(full_backend, STRUCTURAL_TAG, text), "a/bx")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (REGEX, "["),
        (REGEX, r"(a)\1"),
        (REGEX, "(?=a)b"),
        (JSON_SCHEMA, '{"type":"invalid"}'),
        (JSON_SCHEMA, '{"$ref":"https://example.com/schema.json"}'),
        (JSON_SCHEMA, '{"$ref":"#/$defs/absent"}'),
        (JSON_SCHEMA, '{"type":"string","not":{"const":"a"}}'),
        (JSON_SCHEMA, '{"type":"array","uniqueItems":true,"items":{"type":"null"}}'),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(backend: Backend, kind: str, text: str):
    with pytest.raises(Exception, match=r"\w{3}"):
        backend.compile(Constraint(kind, text))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, r"uniqueItems.*\. Leave uniqueItems out; in pyd"),
        ({"type": "string", "not": {"const": "a"}}, r'keys: \["not"\]\. Leave them out'),
        (
            {"oneOf": [{"type": "string"}, {"minLength": 2}]},
            r"fits two of its branches\. Write any",
        ),
    ],
)
def test_a_schema_that_is_refused_is_reported_with_a_way_out(
    schema: dict[str, object], message: str
):
    with pytest.raises(RequestError, match=message):
        _cached("llguidance").compile(Constraint(JSON_SCHEMA, json.dumps(schema)))


def test_one_of_is_taken_where_the_branches_exclude_each_other():
    branches = [
        {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"
    ]
    grammar = started(_cached("llguidance"), JSON_SCHEMA, json.dumps({"oneOf": branches}))
    assert write(grammar, '{"k": "a"}')
    assert not write(
        started(_cached("llguidance"), JSON_SCHEMA, json.dumps({"oneOf": branches})), '{"k": "c"}'
    )


@cache
def _cached(name: str) -> Backend:
    return backend_or_skip(name)


def many_names(count: int) -> dict[str, object]:
    """An object with so many optional properties that the library cannot follow its beginning."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


@pytest.mark.parametrize("count", [600, 2000])
def test_limits_that_are_met_in_what_must_come_first_are_reported_when_it_is_compiled(count: int):
    inner = {"type": "object", "properties": {"a": many_names(count)}, "required": ["a"]}
    for schema in (many_names(count), inner, {"anyOf": [many_names(count)] * 2}):
        with pytest.raises(RequestError, match="items; max is 2000. Ask for fewer optional"):
            _cached("llguidance").compile(Constraint(JSON_SCHEMA, json.dumps(schema)))


def test_large_schemas_within_the_limits_are_compiled():
    names = [f"p{i}" for i in range(2000)]
    for schema in (many_names(100), many_names(2000) | {"required": names}, {"enum": names}):
        assert _cached("llguidance").compile(Constraint(JSON_SCHEMA, json.dumps(schema)))


def test_limits_that_a_library_meets_while_it_writes_are_reported_in_its_words():
    names = [[f"q{i}_{j}" for j in range(50)] for i in range(50)]
    kinds = [{"type": "object", "properties": {n: {} for n in own}} for own in names]
    schema = {"type": "array", "items": {"anyOf": kinds}}
    grammar = started(backend_or_skip("llguidance"), JSON_SCHEMA, json.dumps(schema))
    assert not grammar.problem
    assert not write(grammar, '[{"q0_1": 1}]')
    assert "items; max is" in grammar.problem
