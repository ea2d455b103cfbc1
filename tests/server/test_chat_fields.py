"""Every field of the OpenAI routes has an effect, is refused or is reported."""

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from openai.types import Completion

from banyan.chat_template.named_templates import FillIn
from banyan.messages.requests import Constraint
from banyan.requests import constraint
from banyan.requests.request_spec import RequestSpec
from banyan.server.openai.schema import (
    HARMLESS,
    REFUSED,
    SAMPLING,
    ChatRequest,
    CompletionRequest,
)
from tests.server.fakes import Site
from tests.server.talk import PATH, TOOLS, USER, ask, says, service_with

SPEC = Path(__file__).resolve().parents[3] / "shared" / "spec" / "sglang_api.md"
ROUTES = {
    "chat": (PATH, {"messages": USER}, ChatRequest),
    "completion": ("/v1/completions", {"prompt": "Hi"}, CompletionRequest),
}

# field: (value, what of the request to the engine shows it, as it is with the value)
EFFECTS = {
    "temperature": (0.25, lambda r: r.sampling.temperature, 0.25),
    "top_p": (0.5, lambda r: r.sampling.top_p, 0.5),
    "top_k": (7, lambda r: r.sampling.top_k, 7),
    "min_p": (0.125, lambda r: r.sampling.min_p, 0.125),
    "frequency_penalty": (0.5, lambda r: r.sampling.frequency_penalty, 0.5),
    "presence_penalty": (0.5, lambda r: r.sampling.presence_penalty, 0.5),
    "repetition_penalty": (1.5, lambda r: r.sampling.repetition_penalty, 1.5),
    "min_tokens": (3, lambda r: r.sampling.min_new_tokens, 3),
    "max_tokens": (9, lambda r: r.sampling.max_new_tokens, 9),
    "max_completion_tokens": (9, lambda r: r.sampling.max_new_tokens, 9),
    "seed": (11, lambda r: r.sampling.seed, 11),
    "logit_bias": ({"5": 1.5}, lambda r: r.sampling.logit_bias, {5: 1.5}),
    "ignore_eos": (True, lambda r: r.sampling.ignore_eos, True),
    "stop_token_ids": ([7], lambda r: r.sampling.stop_ids, (256, 7)),
    "stop": (["x", "y"], lambda r: r.text.stop, ("x", "y")),
    "stop_regex": ("a+b", lambda r: r.text.stop_regex, ("a+b",)),
    "no_stop_trim": (True, lambda r: r.text.no_stop_trim, True),
    "skip_special_tokens": (False, lambda r: r.text.skip_special_tokens, False),
    "spaces_between_special_tokens": (
        False,
        lambda r: r.text.spaces_between_special_tokens,
        False,
    ),
    "priority": (3, lambda r: r.message.priority, 3),
    "rid": ("mine", lambda r: r.id, "mine"),
    "n": (1, lambda r: r.id.count("_"), 0),
    "routed_dp_rank": (3, lambda r: r.message.replica, 3),
    "data_parallel_rank": (3, lambda r: r.message.replica, 3),
    "disagg_prefill_dp_rank": (3, lambda r: r.message.prefill_replica, 3),
    "input_ids": ([1, 2, 3], lambda r: r.prompt, [1, 2, 3]),
    "regex": ("a+", lambda r: r.message.grammar, "regex:a+"),
    "ebnf": ('root ::= "a"', lambda r: r.message.grammar, 'ebnf:root ::= "a"'),
}


def honoured(route: str) -> set[str]:
    return {*ROUTES[route][2].__struct_fields__, *SAMPLING, *constraint.FIELDS}


NAMESPACES = ("cache_salt", "extra_key")


@pytest.mark.parametrize(
    ("route", "field"), [(r, f) for r in ROUTES for f in EFFECTS if f in honoured(r)]
)
def test_a_field_reaches_the_engine(site: Site, http: httpx.Client, field: str, route: str) -> None:
    path, body, _ = ROUTES[route]
    value, effect, wanted = EFFECTS[field]
    answer = http.post(path, json={**body, field: value})
    assert answer.status_code == 200, answer.text
    assert effect(site.generator.asked[-1]) == wanted
    assert "x-banyan-warnings" not in answer.headers


@pytest.mark.parametrize("route", [*ROUTES, "native"])
def test_a_header_names_the_replica_before_the_body_does(
    site: Site, http: httpx.Client, route: str
) -> None:
    path, body = ROUTES[route][:2] if route in ROUTES else ("/generate", {"text": "ab"})

    def asked(rank: str, **more: object) -> httpx.Response:
        headers = {"X-Data-Parallel-Rank": rank.encode()} if rank else {}
        return http.post(path, json={**body, **more}, headers=headers)

    for rank, in_body, wanted in (("2", 1, 2), ("2", None, 2), ("", 1, 1), ("", None, -1)):
        assert asked(rank, data_parallel_rank=in_body).status_code == 200
        assert site.generator.asked[-1].message.replica == wanted
    if route in ROUTES:
        assert asked("", routed_dp_rank="1").status_code == 200, "a number may be a text"
    for rank in ("x", "-1", "1.0", "9" * 20, "²"):
        assert asked(rank).status_code == 400, rank
    for rank in (-1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, "x", 1.5, True, [1]):
        assert asked("", routed_dp_rank=rank).status_code == 400, rank


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", NAMESPACES)
def test_a_salt_gives_the_prefix_cache_a_namespace_of_its_own(
    site: Site, http: httpx.Client, field: str, route: str
) -> None:
    path, body, _ = ROUTES[route]
    for extra in ({}, {field: "a"}, {field: "b"}, {field: "a"}):
        assert http.post(path, json={**body, **extra}).status_code == 200
    bare, one, other, again = (r.message.namespace for r in site.generator.asked[-4:])
    assert one == again and len({bare, one, other}) == 3


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_interface_has_an_outcome(route: str) -> None:
    if not SPEC.is_file():
        pytest.skip("the interface's description is not in ../shared/spec")
    section = SPEC.read_text().partition(f"## {'6' if route == 'chat' else '5'}. ")[2]
    request = section.partition("Request: ")[2].partition("Response: ")[0]
    named = set(re.findall(r"`(\w+)`: (?:[A-Z]|int|str|bool|float|list)", request))
    named -= {"url", "detail", "role", "content", "tool_call_id", "name", "phase", "prefix"}
    named -= {"content_hash", "fps", "max_frames", "reasoning_content", "tool_calls"}
    named -= {n for n in named if n.startswith("max_") and n.endswith(("_pixel", "_frame"))}
    named -= {"max_image_tokens"}
    assert len(named) > 40
    assert sorted(named - honoured(route) - set(REFUSED) - HARMLESS) == []


def test_a_field_is_in_one_list_only() -> None:
    for route in ROUTES:
        assert not honoured(route) & set(REFUSED) and not honoured(route) & HARMLESS
    assert not set(REFUSED) & HARMLESS


@pytest.mark.parametrize("route", ROUTES)
def test_the_answer_repeats_the_metadata(site: Site, http: httpx.Client, route: str) -> None:
    path, body, _ = ROUTES[route]
    body = {**body, "metadata": {"team": "a"}}
    assert http.post(path, json=body).json()["metadata"] == {"team": "a"}
    stream = http.post(path, json={**body, "stream": True})
    assert stream.text.count('"metadata":{"team":"a"}') == 1
    assert "x-banyan-warnings" not in stream.headers


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_says_why_in_one_sentence(http: httpx.Client, field: str) -> None:
    value = {"return_hidden_states": True, "beam_width": 4, "modalities": ["audio"]}.get(field, "x")
    answer = http.post(PATH, json={"messages": USER, field: value})
    assert answer.status_code in (400, 501), answer.text
    assert answer.json()["param"] == field and len(answer.json()["message"]) < 200


@pytest.mark.parametrize("field", ["include_usage", "continuous_usage_stats"])
@pytest.mark.parametrize("route", ROUTES)
def test_usage_in_a_stream_is_exact_wherever_it_comes(
    site: Site, http: httpx.Client, route: str, field: str
) -> None:
    path, body, _ = ROUTES[route]
    whole = http.post(path, json={**body, "n": 2}).json()["usage"]
    streamed = {**body, "n": 2, "stream": True, "stream_options": {field: True}}
    lines = http.post(path, json=streamed).text.split("\n\n")[:-2]
    chunks = [httpx.Response(200, text=line[6:]).json() for line in lines]
    if field == "include_usage":
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
        assert all(c["usage"] is None for c in chunks[:-1])
    else:
        last = {c["choices"][0]["index"]: c["usage"] for c in chunks}
        assert sum(u["completion_tokens"] for u in last.values()) == whole["completion_tokens"]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}, {"best_of": 2}])
def test_completions_satisfy_the_official_types(
    http: httpx.Client, fields: dict[str, object]
) -> None:
    body = {"prompt": "Hi", **fields}
    whole = http.post("/v1/completions", json=body)
    Completion.model_validate_json(whole.content, strict=True)
    if "best_of" in fields:
        return
    lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
    ends: list[int] = []
    for line in lines:
        choice = httpx.Response(200, text=line[6:]).json()["choices"][0]
        if choice["finish_reason"]:
            ends.append(choice["index"])
        # Their type wants a reason in every chunk, which no server sends.
        checked = line[6:].replace('"finish_reason":null', '"finish_reason":"stop"')
        Completion.model_validate_json(checked, strict=True)
    assert sorted(ends) == list(range(len(ends))) and len(ends) == fields.get("n", 1)


def test_each_choice_of_several_has_its_own_calls_and_thoughts(
    site: Site, http: httpx.Client
) -> None:
    site.state.service = service_with(site)
    says(site, '<think>a</think><tool_call>{"name": "search", "arguments": {}}</tool_call>')
    answer = http.post(PATH, json={"messages": USER, "tools": TOOLS, "n": 3}).json()
    ids = [c["message"]["tool_calls"][0]["id"] for c in answer["choices"]]
    assert len(set(ids)) == 3
    assert [c["message"]["reasoning_content"] for c in answer["choices"]] == ["a"] * 3
    assert {c["finish_reason"] for c in answer["choices"]} == {"tool_calls"}


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_a_budget_of_thinking_reaches_the_engine(site: Site, http: httpx.Client, name: str) -> None:
    site.state.service = service_with(site)
    end = tuple(site.tokenizer.encode("</think>", add_special_tokens=False))
    says(site, "<think>a</think>b")
    body = {"messages": USER, name: 12}

    assert http.post(PATH, json=body).status_code == 200
    free = Constraint.decode(site.generator.asked[-1].message.grammar)
    assert (free.kind, free.after, free.budget) == ("free", end, 12)
    assert http.post(PATH, json={**body, "regex": "a+"}).status_code == 200
    both = Constraint.decode(site.generator.asked[-1].message.grammar)
    assert (both.kind, both.text, both.after, both.budget) == ("regex", "a+", end, 12)

    for wrong in (0, -1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, "x", 1.5, True):
        assert http.post(PATH, json={**body, name: wrong}).status_code == 400, wrong
    site.state.service = service_with(site, reasoning="none")
    assert name in http.post(PATH, json=body).headers["x-banyan-warnings"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_thoughts_and_calls(
    site: Site, http: httpx.Client, stream: bool
) -> None:
    site.state.service = service_with(site)
    written = '<think>a</think>b<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    says(site, written, pieces=len(written))
    body = {"messages": USER, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    answer = http.post(PATH, json={**body, "stream": stream})
    if stream:
        lines = answer.text.split("\n\n")[:-2]
        choices = [httpx.Response(200, text=line[6:]).json()["choices"][0] for line in lines]
    else:
        choices = answer.json()["choices"]
    tokens = [t["token"] for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert "".join(tokens) == written


def test_a_gap_is_filled_when_the_server_knows_how(site: Site, http: httpx.Client) -> None:
    site.state.service = replace(site.service, fill_in=FillIn("<|user|>", "<|tool|>", "<|end|>"))
    answer = http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 200
    prompt = site.generator.asked[-1].prompt
    decoded = site.tokenizer.decode(prompt, skip_special_tokens=False)
    assert decoded == "<|user|>a<|tool|>b<|end|>" and len(prompt) == 5
    refused = http.post("/v1/completions", json={"prompt": [1], "suffix": "b"})
    assert refused.status_code == 400 and refused.json()["param"] == "suffix"


def test_a_developer_speaks_as_the_system(site: Site, http: httpx.Client) -> None:
    ask(http, False, messages=[{"role": "developer", "content": "Be brief."}, *USER])
    prompt = site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)
    assert prompt.startswith("<|system|>Be brief.<|end|><|user|>Hi")


def test_parts_of_text_are_joined(site: Site, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask(http, False, messages=[{"role": "user", "content": parts}])
    request: RequestSpec = site.generator.asked[-1]
    assert "a b" in site.tokenizer.decode(request.prompt)
