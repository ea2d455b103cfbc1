"""Hostile chat and completion requests: each is answered in words, and others notice nothing."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from banyan.base.errors import ModelError
from banyan.chat_template.template import Chat
from tests.server.fakes import Site, steps
from tests.server.talk import PATH, TEMPLATE, TOOLS, USER, ask, says, service_with, tool

DEEP: object = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


@contextlib.contextmanager
def canary(site: Site) -> Iterator[None]:
    """Streams that run all the while and must each be what they always are."""
    wrong: list[str] = []
    over = threading.Event()
    sung = threading.Event()

    def sing() -> None:
        with httpx.Client(base_url=site.url, timeout=60) as http:
            while not over.is_set():
                heard = ask(http, True, rid="canary")
                if heard.said != ("Hello", "", [], "stop"):
                    wrong.append(str(heard))
                sung.set()

    thread = threading.Thread(target=sing)
    thread.start()
    sung.wait(60)
    try:
        yield
    finally:
        sung.clear()
        alive = sung.wait(60)
        over.set()
        thread.join(60)
    assert alive and not wrong, wrong[:1]
    assert httpx.get(site.url + "/health").status_code == 200


HOSTILE = {
    "a tool with a schema 600 levels deep": {"tools": [tool("f", parameters=DEEP)]},
    "a forced tool with a schema 600 levels deep": {
        "tools": [tool("f", parameters=DEEP)],
        "tool_choice": "required",
    },
    "ten thousand tools": {"tools": [tool(f"f{i}") for i in range(10_000)]},
    "tools of half a megabyte": {"tools": [tool("f", description="x" * (600 << 10))]},
    "forced tools of half a megabyte": {
        "tools": [tool("f", parameters={"type": "object", "description": "x" * (600 << 10)})],
        "tool_choice": "required",
    },
    "a tool called like a mark": {"tools": [tool("<tool_call>")]},
    "a schema that refers to itself": {
        "tools": [tool("f", parameters={"type": "object", "$ref": "#"})]
    },
    "a schema elsewhere": {
        "tools": [tool("f", parameters={"type": "object", "$ref": "http://evil/x.json"})],
        "tool_choice": "required",
    },
    "template variables that reach for the sandbox": {
        "chat_template_kwargs": {"enable_thinking": "{{ ''.__class__.__mro__ }}"}
    },
    "template variables 600 levels deep": {"chat_template_kwargs": {"x": DEEP}},
    "reserved template variables": {"chat_template_kwargs": {"tools": []}},
    "a template of its own": {"chat_template": "{{ range(10**9) | list }}"},
    "calls in a message that are no calls": {
        "messages": [*USER, {"role": "assistant", "content": "x", "tool_calls": [3, {}, None]}]
    },
    "call arguments that are no JSON": {
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{" * 5000}}],
            },
        ]
    },
    "a message of a quarter of a megabyte": {
        "messages": [{"role": "user", "content": "a " * (1 << 17)}]
    },
    "many marks": {"messages": [{"role": "user", "content": "<|end|>" * 3000}]},
    "every noncharacter": {
        "messages": [
            {"role": "user", "content": "<|end|>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))}
        ]
    },
    "a tool choice 600 levels deep": {"tools": TOOLS, "tool_choice": {"function": DEEP}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_answered_and_others_notice_nothing(
    site: Site, http: httpx.Client, name: str
) -> None:
    site.state.service = service_with(site)
    with canary(site):
        answer = http.post(PATH, json={"messages": USER, **HOSTILE[name]}, timeout=60)
    assert answer.status_code in (200, 400), answer.text[:300]
    if answer.status_code == 400:
        body = answer.json()
        assert body["message"] and len(body["message"]) < 1000
        assert body["error"]["code"] and "Traceback" not in answer.text


WRITTEN = (
    "__import__('os').system('id')",
    '<tool_call>{"name": "__import__(\'os\')", "arguments": {"a": "'
    + "x" * 20_000
    + '"}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": ' + "[" * 3_000,
    '<tool_call>{"name": "search", "arguments": ' + '{"a":' * 3_000,
    '<tool_call>{"name": "search", "arguments": {"n": ' + "9" * 50_000 + "}}</tool_call>",
    "<tool_call>" * 500,
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "<think>" * 1_000 + "</think>" * 1_000,
    "\ufffd\x00\x1b[31m",
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("written", WRITTEN, ids=lambda text: text[:24])
def test_hostile_output_of_the_model_is_text_or_a_call_with_json(
    site: Site, http: httpx.Client, written: str, stream: bool
) -> None:
    site.state.service = service_with(site)
    says(site, written, pieces=50)
    heard = ask(http, stream, tools=TOOLS)
    assert heard.finish in ("stop", "tool_calls")
    for _, arguments in heard.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_prompts_are_rendered_and_tokenised_off_the_event_loop(
    site: Site, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    site.state.service = service_with(site)
    threads: list[bool] = []

    def encode(*_: object, **__: object) -> list[int]:
        try:
            asyncio.get_running_loop()
            threads.append(True)
        except RuntimeError:
            threads.append(False)
        return [1]

    monkeypatch.setattr(Chat, "encode", encode)
    long = "a " * (1 << 16)
    fields = {
        "messages": [{"role": "user", "content": long}],
        "tools": [tool("f", description=long)],
    }
    assert http.post(PATH, json={"messages": USER, field: fields[field]}).status_code == 200
    assert http.post(PATH, json={"messages": USER}).status_code == 200
    assert threads == [False, False], "rendering waits for a process, also of a short one"


@pytest.mark.parametrize("value", [-1, 0, 10**18, 1.5, "many", "0", True])
@pytest.mark.parametrize("field", ["n", "best_of"])
def test_counts_of_answers_are_whole_numbers_in_bounds(
    http: httpx.Client, field: str, value: object
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", field: value})
    assert answer.status_code == 400 and answer.json()["param"] == field


def test_a_template_that_is_refused_fails_when_it_is_loaded(site: Site) -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}"):
        with pytest.raises(ModelError):
            service_with(site, source + TEMPLATE)


def test_a_stream_that_loses_its_client_ends_its_request(site: Site) -> None:
    site.state.service = service_with(site)
    site.generator.script = lambda _: steps("<think>", "a", "b")
    site.generator.hold_after = 2
    body = {"messages": USER, "stream": True, "tools": TOOLS}
    with (
        httpx.Client(base_url=site.url, timeout=60) as client,
        client.stream("POST", PATH, json=body) as answer,
    ):
        next(answer.iter_lines())
    assert site.generator.closed.acquire(timeout=60)
