"""Chat templates with tools, calls, results and thinking equal transformers' rendering byte for
byte; templates by name and file; how gaps are filled."""

import json
import random
import time
from functools import cache
from pathlib import Path

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from banyan.base.errors import ConfigError
from banyan.chat_template.named_templates import (
    CHAT_TEMPLATES,
    FillIn,
    fill_in_form,
    template_source,
)
from banyan.chat_template.processes import TemplateProcesses
from banyan.chat_template.template import Chat, ChatTemplate, load_chat
from banyan.parsers.choice import reasoning_parser_for, tool_parser_for
from banyan.tokenizer.load import load_tokenizer
from tests.support.tokenizer_oracles import FOLDERS, demo_gguf, folder

COUNT = 200
WORDS = (
    "Hello", "don't", "  two", "line\nbreak\n\n", "日本語", "😀", "<b>&amp;</b>", '{"a": 1}',
    "tail ",
    "1 < 2", "{{ x }}", "", "'q' \"Q\"", "\\n",
)  # fmt: skip
MAX_KEPT_BYTES = 8 << 20
SETTLED_S = 60.0

Messages = list[dict[str, object]]


@cache
def chat(name: str) -> Chat:
    return load_chat(load_tokenizer(demo_gguf() if name == "demo" else folder(name)))


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))


def tool(rng: random.Random) -> dict[str, object]:
    properties = {text(rng): {"type": "string", "description": text(rng)}}
    function = {
        "name": rng.choice(["weather", "search"]),
        "description": text(rng),
        "parameters": {"type": "object", "properties": properties, "required": []},
    }
    return {"type": "function", "function": function}


def call(rng: random.Random, number: int) -> dict[str, object]:
    arguments = json.dumps({"city": text(rng), "n": number}, ensure_ascii=False)
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def conversation(rng: random.Random, has_calls: bool) -> Messages:
    """A system message, turns, calls of tools and their results, sometimes thinking."""
    messages: Messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text(rng)})
        if has_calls and rng.random() < 0.5:
            calls = [call(rng, i) for i in range(rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": c["id"], "content": text(rng)} for c in calls
            ]
        answer: dict[str, object] = {"role": "assistant", "content": text(rng)}
        if rng.random() < 0.3:
            answer["reasoning_content"] = text(rng)
        messages.append(answer)
    return messages[:-1] if rng.random() < 0.7 else messages


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
def test_two_hundred_conversations_render_as_transformers_renders_them(name: str) -> None:
    rng = random.Random(11)
    made = chat(name)
    has_calls = "tool_calls" in made.template.source
    for _ in range(COUNT):
        messages = conversation(rng, has_calls)
        tools = [tool(rng) for _ in range(rng.randint(1, 3))] if rng.random() < 0.5 else None
        thinking = {} if rng.random() < 0.5 else {"enable_thinking": rng.random() < 0.5}
        opens = rng.random() < 0.8
        given = [
            # The one thing the oracle refuses and clients send: a call without content.
            {**m, "content": ""} if m["content"] is None and name == "qwen3" else m
            for m in messages
        ]
        rendered, _ = render_jinja_template(
            conversations=[given],
            tools=tools,
            chat_template=made.template.source,
            add_generation_prompt=opens,
            **made.tokenizer.facts.named,
            **thinking,
        )
        assert made.template.render(messages, tools, opens, **thinking) == rendered[0]


@pytest.mark.parametrize(
    ("name", "takes_tools", "tools", "reasoning"),
    [
        ("demo", False, "none", "none"),
        ("qwen3", True, "qwen25", "qwen3"),
        ("deepseek_v3", False, "deepseekv3", "none"),
        ("llama3_1", False, "none", "none"),
    ],
)
def test_what_a_template_shows_of_tools_is_known(
    name: str, takes_tools: bool, tools: str, reasoning: str
) -> None:
    template = chat(name).template
    assert template.takes_tools is takes_tools
    assert tool_parser_for(template.source) == tools
    assert reasoning_parser_for(template.source) == reasoning
    assert ("enable_thinking" in template.variables) is (name == "qwen3")


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ '' + messages[-1].content }}"],
)
def test_a_call_without_content_has_none_in_the_prompt(source: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(random.Random(0), 0)]}
    assert "None" not in ChatTemplate(source).render([message])


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_templates_by_name_render_a_conversation(name: str) -> None:
    template = ChatTemplate(template_source(name) or "", {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    text = template.render(messages)
    places = [text.index(word) for word in ("Be brief.", "One", "Two", "Three")]
    assert places == sorted(places)


def test_a_template_may_be_text_or_a_file(tmp_path: Path) -> None:
    jinja, wrapped, prefixes = (tmp_path / n for n in ("a.jinja", "b.json", "c.json"))
    jinja.write_text("{{ messages }}")
    wrapped.write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    prefixes.write_text(
        json.dumps(
            {
                "name": "mine",
                "system": "<|im_start|>system",
                "user": "<|im_start|>user",
                "assistant": "<|im_start|>assistant",
                "sep_style": "CHATML",
                "sep": "<|im_end|>",
            }
        )
    )
    assert template_source("") is None
    assert template_source("{{ 2 }}") == "{{ 2 }}"
    assert template_source(str(jinja)) == "{{ messages }}"
    assert template_source(str(wrapped)) == "{{ 1 }}"
    user = [{"role": "user", "content": "Hi"}]
    mine, chatml = (ChatTemplate(template_source(n) or "") for n in (str(prefixes), "chatml"))
    assert mine.render(user) == chatml.render(user)


@pytest.mark.parametrize("given", ["no-such-name", "gone.jinja", "gone.json"])
def test_a_template_that_is_not_there_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        template_source(given)


def test_gaps_are_filled_in_the_order_of_the_model(tmp_path: Path) -> None:
    assert fill_in_form("") is None
    assert fill_in_form("qwen_coder").prompt("a", "b") == (
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    assert fill_in_form("deepseek_coder").prompt("a", "b") == (
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"
    )
    file = tmp_path / "fim.json"
    tokens = {"fim_begin_token": "B", "fim_middle_token": "M", "fim_end_token": "E"}
    file.write_text(json.dumps({**tokens, "fim_position": "END"}))
    assert fill_in_form(str(file)) == FillIn("B", "E", "M")
    file.write_text(json.dumps({**tokens, "fim_position": "START"}))
    with pytest.raises(ConfigError, match="fim_position"):
        fill_in_form(str(file))
    with pytest.raises(ConfigError, match="--completion-template"):
        fill_in_form("no-such-name")


def test_a_template_process_keeps_nothing_of_a_long_conversation() -> None:
    known = set(psutil.Process().children())
    process = TemplateProcesses("{% for m in messages %}{{ m }}{% endfor %}")
    (worker,) = set(psutil.Process().children()) - known
    process.render({"messages": ["hi"]})
    before = worker.memory_info().rss
    process.render({"messages": ["a" * 1000] * 16_000})
    deadline_s = time.monotonic() + SETTLED_S
    while worker.memory_info().rss - before > MAX_KEPT_BYTES:
        assert time.monotonic() < deadline_s, worker.memory_info()
        time.sleep(0.01)
