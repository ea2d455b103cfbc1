"""Tool-call parsers: every format, split anywhere, whole or damaged or cut short.

`make test-parsers` plays 10,000 answers for each parser; PARSER_CASES sets another number.
"""

import json
import os
import random
import subprocess
import sys
import zlib

import pytest

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from banyan.parsers.partial_json import JsonCopy
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
from banyan.parsers.tool_calls.definitions import Tools, read_tools
from banyan.parsers.tool_calls.json_calls import BARE_LIST
from tests.support.tool_outputs import TOOLS, WRITERS, call, damaged, lead, split

CASES = int(os.environ.get("PARSER_CASES", "120"))


def parse(
    name: str, pieces: list[str], is_cut: bool = False, tools: Tools = TOOLS
) -> list[AnswerDelta]:
    parser = ToolParser(TOOL_PARSERS.load(name), tools)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return merge_deltas(found + parser.finish(is_cut))


def said(parts: list[AnswerDelta]) -> str:
    return "".join(p.text for p in parts if isinstance(p, TextDelta))


def calls(parts: list[AnswerDelta]) -> list[tuple[str, object]]:
    """(name, arguments) of each call; fails where the arguments are not a JSON object."""
    found = []
    for start in (p for p in parts if isinstance(p, ToolCallStart)):
        text = arguments(parts, start.index)
        decoded = json.loads(text)
        assert isinstance(decoded, dict), text
        found.append((start.name, decoded))
    return found


def arguments(parts: list[AnswerDelta], index: int) -> str:
    return "".join(p.text for p in parts if isinstance(p, ToolCallArguments) and p.index == index)


def rng_of(name: str) -> random.Random:
    return random.Random(zlib.crc32(name.encode()))


@pytest.mark.parametrize("name", WRITERS)
def test_calls_come_out_as_they_were_written_however_the_answer_is_split(name: str) -> None:
    rng = rng_of(name)
    for _ in range(CASES):
        text, wanted = lead(rng), [call(rng) for _ in range(rng.randint(1, 3))]
        answer = WRITERS[name](rng, wanted, text)
        whole = parse(name, [answer])
        assert calls(whole) == [(c.name, c.arguments) for c in wanted], answer
        assert said(whole) == text, answer
        assert parse(name, list(split(rng, answer))) == whole, answer


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_answers_come_out_the_same_however_they_are_split(name: str) -> None:
    rng = rng_of(name)
    for _ in range(CASES):
        answer = WRITERS[name](rng, [call(rng) for _ in range(rng.randint(1, 2))], lead(rng))
        answer = damaged(rng, answer)
        whole = parse(name, [answer])
        assert parse(name, list(split(rng, answer))) == whole, answer
        calls(whole)  # the arguments are JSON whatever the model wrote


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_short_is_a_beginning_of_the_whole_call(name: str) -> None:
    rng = rng_of(name)
    for _ in range(CASES // 4):
        wanted = [call(rng)]
        answer = WRITERS[name](rng, wanted, "")
        whole = parse(name, [answer])
        cut = answer[: rng.randint(0, len(answer))]
        found = parse(name, list(split(rng, cut)), is_cut=True)
        assert found == parse(name, [cut], is_cut=True)
        if any(isinstance(p, ToolCallStart) for p in found):
            assert arguments(whole, 0).startswith(arguments(found, 0)), (cut, found)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "text", ["", "Hello.", " spaced \n", "a < b <tool", "[1] see {x}", "{}", "[", "<", '{"a": 1}']
)
def test_an_answer_without_calls_is_the_same_text(name: str, text: str) -> None:
    assert said(parse(name, [text])) == text
    assert said(parse(name, list(text))) == text


def test_arguments_stream_while_they_arrive() -> None:
    parser = ToolParser(TOOL_PARSERS.load("qwen25"), TOOLS)
    parser.feed('<tool_call>\n{"name": "f", "arguments": {"city": "')
    assert parser.feed("Par") == [ToolCallArguments(0, "Par")]
    assert parser.feed("is") == [ToolCallArguments(0, "is")]


def test_text_parameters_stream_while_they_arrive() -> None:
    parser = ToolParser(TOOL_PARSERS.load("qwen3_coder"), TOOLS)
    parser.feed("<tool_call>\n<function=f>\n<parameter=city>\nPa")
    assert parser.feed('r"is') == [ToolCallArguments(0, 'r\\"is')]


def test_text_is_not_held_back_longer_than_a_marker_could_last() -> None:
    parser = ToolParser(TOOL_PARSERS.load("qwen25"), TOOLS)
    assert parser.feed("a <tool") == [TextDelta("a")]
    assert parser.feed("s") == [TextDelta(" <tools")]


@pytest.mark.parametrize("is_cut", [False, True])
def test_only_a_model_that_ended_by_itself_gets_its_call_completed(is_cut: bool) -> None:
    found = parse("qwen25", ['<tool_call>{"name": "f", "arguments": {"city": "Pa'], is_cut)
    assert arguments(found, 0) == ('{"city": "Pa' if is_cut else '{"city": "Pa"}')


def test_further_calls_are_left_out_when_one_is_wanted() -> None:
    parser = ToolParser(TOOL_PARSERS.load("qwen25"), TOOLS, max_calls=1)
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert calls(parser.feed(one * 3) + parser.finish()) == [("f", {})]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": True, "b": None}', {"a": True, "b": None}),
        ('{"a": "line\nbreak\ttab"}', {"a": "line\nbreak\ttab"}),
        ('{"a": "C:\\dir"}', {"a": "C:\\dir"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ('{"a": __import__("os")}', {}),
        ('{"a": 1, "b": unquoted}', {"a": 1}),
        ('{"a": ' + "[" * 100_000, {"a": None}),
        ('{"a": ' + "9" * (1 << 20) + "}", {}),
        ('{"a": NaN}', {}),
        ("[1]", {}),
    ],
    ids=lambda given: str(given)[:24],
)
def test_arguments_are_json_whatever_the_model_writes(given: str, wanted: object) -> None:
    answer = f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'
    ((name, found),) = calls(parse("qwen25", [answer]))
    assert name == "f"
    if given.count("[") < 1000:
        assert found == wanted


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "a\\u0000b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "' + "x" * 300 + '", "arguments": {}}</tool_call>',
    ],
    ids=lambda given: given[:40],
)
def test_what_is_no_call_is_text(answer: str) -> None:
    found = parse("qwen25", [answer])
    assert calls(found) == [] and said(found) == answer
    assert parse("qwen25", list(answer)) == found


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"name": "Ada", "born": 1815}'),
        ("pythonic", "[unknown(x=1)]"),
        ("pythonic", "[f(x=__import__('os').system('id'))]"),
        ("pythonic", "[f(x=1) for x in y]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(x=" + "(" * 5000 + ")" * 5000 + ")]"),
        ("pythonic", "[f(x=" + "9" * 100_000 + ")]"),
    ],
    ids=lambda given: given[:32],
)
def test_unmarked_text_calls_only_tools_of_the_request_with_literals(
    name: str, answer: str
) -> None:
    found = parse(name, [answer])
    assert calls(found) == [] and said(found) == answer
    assert said(parse(name, list(answer))) == answer


def test_the_id_that_kimi_gives_a_call_is_kept() -> None:
    answer = WRITERS["kimi_k2"](random.Random(0), [call(random.Random(0))], "")
    assert [p.id for p in parse("kimi_k2", [answer]) if isinstance(p, ToolCallStart)] != [""]
    assert "functions." in answer


def test_the_schema_decides_what_a_parameter_in_tags_stands_for() -> None:
    answer = (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>[1]</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>[2]</arg_value>\n</tool_call>"
    )
    wanted = {"city": "12", "days": 12, "note": None, "other": [1]}
    assert calls(parse("glm45", [answer])) == [("f", wanted)]


@pytest.mark.parametrize("is_split", [False, True])
def test_forced_calls_are_a_bare_list(is_split: bool) -> None:
    answer = '[{"name": "f", "parameters": {"days": 1}}, {"name": "search", "parameters": {}}]'
    parser = ToolParser(BARE_LIST, TOOLS)
    found = [p for piece in (answer if is_split else [answer]) for p in parser.feed(piece)]
    assert calls(found + parser.finish()) == [("f", {"days": 1}), ("search", {})]


def test_openers_without_calls_are_read_once() -> None:
    """In a process of its own: reading on to the end at each of them would take many minutes."""
    code = f"""
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
from banyan.parsers.tool_calls.definitions import Tools
for name in {list(WRITERS)!r}:
    format = TOOL_PARSERS.load(name)
    for marker in [m for m in format.markers if "end" not in m and "/" not in m]:
        parser = ToolParser(format, Tools({{}}))
        parser.feed(marker * 20_000)
        parser.finish()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout == "done\n"


def test_every_parser_has_a_writer() -> None:
    written = {id(TOOL_PARSERS.load(name)) for name in WRITERS}
    assert {id(TOOL_PARSERS.load(name)) for name in TOOL_PARSERS} == written


@pytest.mark.parametrize(
    "given",
    [
        "f",
        [3],
        [{"type": "web_search"}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "x" * 129}}],
        [{"type": "function", "function": {"name": "<|im_end|>"}}],
        [{"type": "function", "function": {"name": "f"}}] * 2,
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
        [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}},
            }
        ],
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)],
    ],
    ids=lambda given: str(given)[:50],
)
def test_hostile_tool_definitions_are_refused(given: object) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(given)
    assert caught.value.param == "tools" and len(str(caught.value)) < 300


def test_json_copy_passes_on_only_what_can_be_completed() -> None:
    from banyan.parsers.incremental import StreamingText

    text = json.dumps({"a": [1, {"b": "x\\y"}], "c": -1.5e3, "": None}, indent=1)
    for end in range(len(text)):
        source, put, closers = StreamingText(), [], []
        source.add(text[:end])
        copying = JsonCopy(source, put.append, closers).value()
        for _ in copying:
            break
        if put:
            json.loads("".join(put) + "".join(reversed(closers)))


@pytest.mark.parametrize("name", ["hermes", "qwen25"])
@pytest.mark.parametrize(
    ("inner", "count"),
    [
        ('{"name": "search", "arguments": {"q": "x"}}}', 1),
        ('{"name": "search", "arguments": {"q": "x"}}}\n', 1),
        ('{"name": "search", "arguments": {"q": "x"}\n', 1),
        ('{"name": "search", "arguments": {"q": "x"}}\n' * 2, 2),
        ('[{"name": "search", "arguments": {"q": "x"}}]\n', 1),
    ],
)
def test_common_mistakes_between_tags_leave_no_tags_in_the_text(
    name: str, inner: str, count: int
) -> None:
    answer = f"<tool_call>\n{inner}</tool_call>"
    for text in (answer, f"{answer}\n{answer}"):
        for pieces in ([text], list(text)):
            parts = parse(name, pieces)
            assert calls(parts) == [("search", {"q": "x"})] * count * text.count("<tool_call>")
            assert said(parts) == ""
