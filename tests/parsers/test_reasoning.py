"""Reasoning parsers: thinking and answer, split anywhere; nothing is lost."""

import os
import random
import zlib

import pytest

from banyan.base.errors import ConfigError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    merge_deltas,
)
from banyan.parsers.answer_parser import AnswerFormat, AnswerParser
from banyan.parsers.choice import (
    choose_parsers,
    reasoning_parser_for,
    tool_parser_for,
)
from banyan.parsers.reasoning import REASONING_PARSERS, ReasoningParser, SegmentKind
from banyan.parsers.tool_calls import TOOL_PARSERS
from tests.support.tool_outputs import TOOLS, WRITERS, Call, damaged, split, text

CASES = int(os.environ.get("PARSER_CASES", "120"))
TAGS = {
    "apertus2509": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "kimi": ("◁think▷", "◁/think▷"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
AROUND = {
    "cohere_command3": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "ernie45": ("<response>", "</response>"),
    "hunyuan_a13b": ("<answer>", "</answer>"),
}
ALWAYS = ("deepseek-r1", "qwen3-thinking", "step3")
NAMES = list(
    {id(REASONING_PARSERS.load(n)): n for n in reversed(REASONING_PARSERS.names())}.values()
)
"""One name of each format."""


def parse(name: str, pieces: list[str], starts_inside: bool = False) -> dict[SegmentKind, str]:
    parser = ReasoningParser(REASONING_PARSERS.load(name), starts_inside)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    assert "".join(text for _, text in found) == "".join(pieces)
    return {kind: "".join(t for k, t in found if k is kind) for kind in SegmentKind}


def written(name: str, thought: str, said: str) -> str:
    """An answer as a model of this family writes it."""
    if name == "gpt-oss":
        opening = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return (opening if thought else "") + f"<|channel|>final<|message|>{said}<|return|>"
    start, end = TAGS.get(name, ("<think>", "</think>"))
    said = said.join(AROUND.get(name, ("", "")))
    return f"{start}\n{thought}\n{end}\n\n{said}" if thought else said


def rng_of(name: str) -> random.Random:
    return random.Random(zlib.crc32(name.encode()))


@pytest.mark.parametrize("name", NAMES)
def test_thinking_and_answer_come_apart_however_they_are_split(name: str) -> None:
    rng = rng_of(name)
    for _ in range(CASES):
        thought, said = text(rng).strip() or "hm", text(rng).strip() or "yes"
        answer = written(name, thought, said)
        found = parse(name, list(split(rng, answer)))
        assert (found[SegmentKind.REASONING], found[SegmentKind.TEXT]) == (thought, said), answer


@pytest.mark.parametrize("name", NAMES)
def test_damaged_answers_come_out_the_same_however_they_are_split(name: str) -> None:
    rng = rng_of(name)
    for _ in range(CASES):
        answer = damaged(rng, written(name, text(rng), text(rng)))
        inside = rng.random() < 0.5
        assert parse(name, list(split(rng, answer)), inside) == parse(name, [answer], inside)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_without_thinking_is_an_answer(name: str) -> None:
    answer = written(name, "", "Hello there.")
    assert parse(name, list(answer))[SegmentKind.TEXT] == "Hello there."


@pytest.mark.parametrize("name", NAMES)
def test_thinking_that_never_ends_is_no_answer(name: str) -> None:
    whole = written(name, "still at it", "")
    cut = whole[: whole.index("at it") + 5]
    found = parse(name, list(cut))
    assert found[SegmentKind.REASONING] == "still at it" and not found[SegmentKind.TEXT]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gpt-oss"])
def test_the_prompt_may_have_opened_the_thinking(name: str) -> None:
    start, end = TAGS.get(name, ("<think>", "</think>"))
    format = REASONING_PARSERS.load(name)
    assert format.starts_in_reasoning(f"<|assistant|>{start}\n")
    assert not format.starts_in_reasoning(f"<|assistant|>{start}\n\n{end}\n\n")
    assert format.starts_in_reasoning("<|assistant|>") is (name in ALWAYS)
    found = parse(name, list(f"why\n{end}\nbecause"), starts_inside=True)
    assert (found[SegmentKind.REASONING], found[SegmentKind.TEXT]) == ("why", "because")


def test_tags_inside_of_an_answer_are_text() -> None:
    said = "The tag <think> opens thinking.</think>"
    assert parse("qwen3", list(said))[SegmentKind.TEXT] == said


def test_a_preamble_of_gpt_oss_is_text_and_its_calls_are_left_for_the_tool_parser() -> None:
    answer = (
        "<|channel|>analysis<|message|>plan<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
        "<|call|>"
    )
    form = AnswerFormat(
        REASONING_PARSERS.load("gpt-oss"), tools=TOOL_PARSERS.load("gpt-oss"), offered=TOOLS
    )
    kinds = [type(p).__name__ for p in answered(form, list(answer))]
    assert kinds == ["ReasoningDelta", "TextDelta", "ToolCallStart", "ToolCallArguments"]


def answered(form: AnswerFormat, pieces: list[str], is_cut: bool = False) -> list[AnswerDelta]:
    parser = AnswerParser(form)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return merge_deltas(found + parser.finish(is_cut))


QWEN = {"reasoning": REASONING_PARSERS.load("qwen3"), "tools": TOOL_PARSERS.load("qwen25")}
WANTED = [Call("f", {"city": "Paris"})]
REASONS_ABOUT_A_CALL = (
    '<think>\nI could write <tool_call>{"name": "g", "arguments": {}}</tool_call>\n</think>\n\n'
)


def test_calls_inside_reasoning_are_not_made() -> None:
    answer = REASONS_ABOUT_A_CALL + WRITERS["qwen25"](random.Random(1), WANTED, "")
    found = answered(AnswerFormat(**QWEN, offered=TOOLS), list(answer))
    assert [p.name for p in found if isinstance(p, ToolCallStart)] == ["f"]
    assert isinstance(found[0], ReasoningDelta) and "<tool_call>" in found[0].text


def test_reasoning_that_is_not_separated_stays_in_the_text_with_its_tags() -> None:
    answer = REASONS_ABOUT_A_CALL + WRITERS["qwen25"](random.Random(1), WANTED, "")
    found = answered(AnswerFormat(**QWEN, offered=TOOLS, separates_reasoning=False), list(answer))
    assert isinstance(found[0], TextDelta) and found[0].text.strip() == REASONS_ABOUT_A_CALL.strip()
    assert [p.name for p in found if isinstance(p, ToolCallStart)] == ["f"]


def test_thinking_that_is_not_streamed_comes_in_one_piece() -> None:
    parser = AnswerParser(AnswerFormat(**QWEN, streams_reasoning=False))
    pieces = [part for char in "<think>\none two\n</think>\n\nHi" for part in parser.feed(char)]
    assert pieces[0] == ReasoningDelta("one two")
    assert all(isinstance(part, TextDelta) for part in pieces[1:])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }} {% if enable_thinking %}<think></think>", "qwen25", "qwen3"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder", "none"),
        ("[gMASK]<think></think><tool_call><arg_key>", "glm45", "glm45"),
        ("<|start|><|channel|>analysis<|message|> functions.x", "gpt-oss", "gpt-oss"),
        ("<｜Assistant｜></think><｜tool▁call▁begin｜>```json", "deepseekv3", "deepseek-r1"),
        ("<｜Assistant｜></think>{{thinking}}<｜tool▁call▁begin｜>", "deepseekv31", "deepseek-v3"),
        ("<|tool_call_argument_begin|>", "kimi_k2", "none"),
        ("<steptml:invoke name=><think>", "step3", "step3"),
        ("[INST] [TOOL_CALLS]", "mistral", "none"),
        ("[SYSTEM_PROMPT][THINK][/THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("<minimax:tool_call><invoke name=><think></think>", "minimax-m2", "qwen3"),
        ("<seed:think><seed:tool_call>\n<function=x>", "seed_oss", "seed_oss"),
        ("<｜DSML｜tool_calls></think>", "deepseekv4", "qwen3"),
        ("<｜DSML｜ calls></think>", "deepseekv41", "qwen3"),
        ("<｜DSML｜function_calls></think>", "deepseekv32", "qwen3"),
        ("<|START_THINKING|><|START_ACTION|>", "cohere_command4", "cohere_command4"),
        ("<|inner_prefix|><|tools_prefix|>", "apertus2509", "apertus2509"),
        ("<|channel>thought<|tool_call>call:<tool_call|>", "gemma4", "gemma4"),
        ("<|tool_call_start|>", "lfm2", "none"),
        ("<tool_calls><tool_call>x<tool_sep><arg_key><think></think>", "hunyuan", "qwen3"),
        ("<function_calls></think>", "olmo3", "qwen3"),
        ("</think><answer><tool_calls>", "jamba", "hunyuan_a13b"),
        ("</think><response><tool_call>", "qwen25", "ernie45"),
        ("<|im_start|>{{ message.content }}<|im_end|>", "none", "none"),
    ],
)
def test_parsers_are_chosen_from_the_template(template: str, tools: str, reasoning: str) -> None:
    assert tool_parser_for(template) == tools
    assert reasoning_parser_for(template) == reasoning


def test_flags_name_parsers_or_none() -> None:
    template = "<tool_call> {{ enable_thinking }} <think></think>"
    chosen = choose_parsers("", "auto", template)
    assert (chosen.tool_name, chosen.reasoning_name) == ("qwen25", "qwen3")
    assert chosen.tools is not None and chosen.reasoning is not None and chosen.thinks_by_default
    named = choose_parsers("hermes", "none", template)
    assert (named.tool_name, named.reasoning) == ("hermes", None)
    for flags in (("no-such", ""), ("", "no-such")):
        with pytest.raises(ConfigError, match="no-such"):
            choose_parsers(*flags, template)
