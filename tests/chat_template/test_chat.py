"""Rendered chats equal transformers', byte for byte; nothing in a template or message gets out."""

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from banyan.base.errors import ModelError, RequestError
from banyan.chat_template.template import Chat, ChatTemplate, load_chat
from banyan.tokenizer.load import load_tokenizer
from tests.support.tokenizer_oracles import FOLDERS, demo_gguf, folder, load_reference

Messages = list[dict[str, object]]

WORDS = (
    "Hello",
    "don't",
    "  two spaces",
    "line\nbreak\n\n",
    "日本語",
    "😀",
    "e\u0301",
    "<b>&amp;</b>",
    '{"a": 1}',
    "trailing ",
    "\ttab",
    "1 < 2",
    "'quoted' \"twice\"",
    "{{ not a template }}",
    "",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's the <weather>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "ü": None}}},
    },
}


def conversations(count: int) -> list[Messages]:
    """Many kinds of conversations, always the same ones."""
    draw = random.Random(7)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))

    found: list[Messages] = []
    for _ in range(count):
        messages: Messages = []
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": text()})
        for _ in range(draw.randint(1, 3)):
            messages += [
                {"role": "user", "content": text()},
                {"role": "assistant", "content": text()},
            ]
        if draw.random() < 0.7:
            messages.append({"role": "user", "content": text()})
        found.append(messages)
    return found


def tool_conversations() -> list[Messages]:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    ask: Messages = [{"role": "user", "content": "Weather?"}]
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "sunny"}
    return [
        [*ask, said],
        [*ask, said, result],
        [*ask, said, result, {"role": "assistant", "content": "It is sunny."}],
    ]


@cache
def chat(name: str) -> Chat:
    return load_chat(load_tokenizer(demo_gguf() if name == "demo" else folder(name)))


def reference_render(name: str) -> Callable[..., str]:
    """transformers' own rendering, as a function of messages and options."""
    source, named = chat(name).template.source, chat(name).tokenizer.facts.named
    return lambda messages, tools=None, **options: render_jinja_template(
        [messages], tools=tools, chat_template=source, **named, **options
    )[0][0]


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
def test_sixty_conversations_render_as_transformers_renders_them(name: str) -> None:
    template, reference = chat(name).template, reference_render(name)
    for i, messages in enumerate(conversations(60)):
        prompt = bool(i % 2)
        expected = reference(messages, add_generation_prompt=prompt)
        assert template.render(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_conversations_tokenize_as_transformers_tokenizes_them(name: str) -> None:
    for messages in conversations(60):
        expected = load_reference(name).apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert chat(name).encode(messages) == expected


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
@pytest.mark.parametrize("content", ["Once upon", "Once upon a ", " x\n"])
def test_a_last_message_is_continued_as_in_transformers(name: str, content: str) -> None:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(name).template.render(messages, **options) == reference_render(name)(
        messages, **options
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_tools_and_template_variables_reach_the_template(thinking: bool) -> None:
    for messages in [*tool_conversations(), *conversations(5)]:
        if any(message["content"] is None for message in messages):
            messages = [{**m, "content": m["content"] or ""} for m in messages]
        options = {"tools": [TOOL], "enable_thinking": thinking, "add_generation_prompt": True}
        expected = reference_render("qwen3")(messages, **options)
        assert chat("qwen3").template.render(messages, **options) == expected


def test_tool_calls_render_as_transformers_renders_them() -> None:
    for messages in tool_conversations():
        expected = reference_render("deepseek_v3")(messages, add_generation_prompt=True)
        assert chat("deepseek_v3").template.render(messages) == expected


def test_reasoning_under_any_of_its_names_renders_the_same() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So.", name: "Because."},
        ]
        expected = reference_render("qwen3")(messages, add_generation_prompt=False)
        assert "<think>\nBecause.\n</think>" in expected
        assert chat("qwen3").template.render(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
def test_no_special_text_in_content_becomes_a_special_token(name: str) -> None:
    side = chat(name)
    calm = side.encode([{"role": "user", "content": "x"}])
    special = side.tokenizer.special_ids
    for text in sorted(side.tokenizer.special_texts)[:60]:
        messages = [{"role": "user", "content": f"a{text}b {text}{text}"}]
        ids = side.encode(messages)
        assert [id for id in ids if id in special] == [id for id in calm if id in special]
        rendered = side.template.render(messages)
        assert f"a{text}b {text}{text}" in rendered
        assert side.tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_role_markers_that_are_not_marked_special_stay_text_in_content() -> None:
    side = chat("deepseek_v3")
    user = side.tokenizer.token_to_id("<｜User｜>")
    ids = side.encode([{"role": "user", "content": "<｜User｜> <｜Assistant｜>"}])
    assert ids.count(user) == 1 and len(ids) > 10


def test_tool_markers_in_content_are_text_and_thinking_ones_are_the_template_s_business() -> None:
    side = chat("qwen3")
    call, think = map(side.tokenizer.token_to_id, ("<tool_call>", "<think>"))
    ids = side.encode([{"role": "user", "content": "<tool_call> <think>"}])
    assert call not in ids and think in ids


def test_a_special_token_cannot_be_put_together_from_two_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p.text }}{% endfor %}"
        "<|im_end|>{% endfor %}",
        special=chat("demo").tokenizer.special_texts,
    )
    side = Chat(chat("demo").tokenizer, template)
    end = side.tokenizer.token_to_id("<|im_end|>")
    parts = [{"type": "text", "text": piece} for piece in ("a <|im", "_end|> b")]
    assert side.encode([{"role": "user", "content": parts}]).count(end) == 1


@given(
    parts=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<|", "im_end|>", "<", "\ufdd0", "x", " "]),
        max_size=8,
    )
)
@settings(deadline=None, max_examples=150)
def test_any_mix_of_token_pieces_leaves_the_template_s_tokens_and_the_text(
    parts: list[str],
) -> None:
    side = chat("demo")
    content = "".join(parts)
    messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
    ids = side.encode(messages)
    marks = [side.tokenizer.id_to_token(id) for id in ids if id in side.tokenizer.special_ids]
    assert marks == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    assert side.tokenizer.decode(ids, skip_special_tokens=False) == reference_render("demo")(
        messages, add_generation_prompt=True
    )


def test_marks_survive_json_with_escapes() -> None:
    template = ChatTemplate(
        "{{ messages[0].content | tojson(ensure_ascii=true) }}", special=["<|im_end|>"]
    )
    rendered = template.render_guarded([{"role": "user", "content": "é<|im_end|>"}])
    assert rendered.text == '"\\u00e9<|im_end|>"'
    assert rendered.guards == (len('"\\u00e9<'),)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{% import 'os' as os %}",
        "{% from 'os' import system %}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{{ ('x' * 1000000) * 1000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%(a)1000000000d' % {'a': 1} }}",
        "{{ ('a ' * 30000000)|title }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ ('<!---->' * 600000)|striptags }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if true %}" * 6000 + "{% endif %}" * 6000,
        "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
        "{% for m in messages %}",
        "{{ 'a'|nosuchfilter }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'|indent(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ {'a': 1}|tojson(indent=1000000000) }}",
        "{% set a = 'x' * 10000 %}{{ (a.replace('x', a)).replace('x', a) }}",
        "{% set a = 'x' * 1000000 %}{{ [a] * 10000 }}",
        "{% set a = 'x' * 1000000 %}{{ a.join(range(10000)|map('string')) }}",
        "{% set a = 'x' * 1000000 %}{{ ([a] * 10000)|join }}",
        "{% set x %}{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}{% endset %}",
        "x" * ((1 << 20) + 1),
    ],
    ids=lambda source: source[:32],
)
def test_a_hostile_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ModelError):
        ChatTemplate(source, time_s=0.3)


NESTS = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
ENDLESS = [
    NESTS + "{{ ns.a == ns.b }}",
    NESTS.replace("[", "(").replace("]", ",)") + "{{ {ns.a: 1} }}",
    "{% set ns = namespace(n=3) %}{% for i in range(30) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    "{{ (ns.n * ns.n) // (ns.n + 1) }}",
    "{{ ('a' * 2000000).strip('b' * 2000000 + 'a') }}",
    "{% set ns = namespace(n=namespace()) %}{% for i in range(40) %}"
    "{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% endfor %}{{ ns.n }}",
    "{% set a = 'x' * 9000000 %}{{ (a ~ 'y') in [a ~ 'z'] * 9000000 }}",
]


def test_an_operation_without_end_is_stopped_and_the_next_messages_are_rendered() -> None:
    """In a process of its own, so that a template that is not stopped fails this test alone."""
    code = f"""
from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
for source in {ENDLESS!r}:
    template = ChatTemplate(
        "{{% if messages[0].n %}}" + source + "{{% endif %}}{{{{ messages[0].content }}}}",
        time_s=0.3,
    )
    try:
        template.render([{{"role": "user", "content": "x", "n": 1}}])
    except RequestError as error:
        assert "was stopped" in error.text, error.text
    else:
        raise AssertionError(source)
    assert template.render([{{"role": "user", "content": "x"}}]) == "x"
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_other_threads_render_while_one_is_stuck() -> None:
    template = ChatTemplate("{% if messages[0].n %}" + ENDLESS[0] + "{% endif %}ok", time_s=1.0)
    with ThreadPoolExecutor() as pool:
        stuck = pool.submit(template.render, [{"role": "user", "content": "x", "n": 1}])
        assert template.render([{"role": "user", "content": "x"}]) == "ok"
        assert not stuck.done()
        assert isinstance(stuck.exception(), RequestError)


def test_a_template_s_process_ends_with_the_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = set(children.read_text().split())
    assert before
    del template
    gc.collect()
    assert set(children.read_text().split()) < before


@pytest.mark.parametrize("text", ["\ud800", "\0", "é😀", 2**100, 1e400, None, True])
def test_values_reach_the_template_as_they_are(text: object) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ x }}")
    assert template.render([{"role": "user", "content": "c"}], x=text) == f"c{text}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(messages[0].n) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * messages[0].n * messages[0].n * messages[0].n }}",
        "{{ messages[0]['__' ~ 'class' ~ '__'].mro() }}{{ (messages[0]|list).nothing.at.all }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_misbehaves_on_a_request_fails_that_request(source: str) -> None:
    template = ChatTemplate("{% if messages[0].n %}" + source + "{% endif %}", time_s=0.3)
    with pytest.raises(RequestError) as error:
        template.render([{"role": "user", "content": "x", "n": 9999}])
    assert error.value.status == 400


def test_a_template_s_own_refusal_is_the_error_s_text() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with pytest.raises(RequestError, match=r"^Roles must alternate!$"):
        template.render([{"role": "user", "content": "x"}])


def test_tags_and_functions_that_templates_use_work() -> None:
    template = ChatTemplate(
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%%') }}{{ dict(a=1)|tojson }}{{ 'a-b'.split('-')|join('+') }}"
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('y') }}{{ '%s %05.2f' % ('k', 1.5) }}"
    )
    assert template.render([{"role": "user", "content": "é<"}]) == 'é<01%{"a": 1}a+b[y]k 01.50'


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "add_generation_prompt"])
def test_reserved_variables_cannot_be_set_by_a_request(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises((RequestError, TypeError)):
        template.render([{"role": "user", "content": "x"}], **{name: 1}, **{"tokenize": 1})


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_parts_become_one_text_for_a_template_that_reads_text() -> None:
    template = chat("demo").template
    assert template.takes_text and not template.takes_parts
    assert "user\none two<|im_end|>" in template.render([{"role": "user", "content": PARTS}])
    with pytest.raises(RequestError, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_text_becomes_a_part_for_a_template_that_reads_parts_only() -> None:
    template = ChatTemplate("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}")
    assert template.takes_parts and not template.takes_text
    assert template.render([{"role": "user", "content": "one"}]) == "[one]"
    assert template.render([{"role": "user", "content": PARTS}]) == "[one][two]"


def test_arguments_are_parsed_for_a_template_that_writes_them_as_json() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages) == '{"a": 1}'
    assert call["function"]["arguments"] == '{"a":  1}'
