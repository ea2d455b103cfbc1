"""Ollama's API, spoken by the official client: every line and body is checked strictly against the
client's types."""

import json
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import ollama
import pytest
from ollama import ChatResponse, GenerateResponse, ListResponse, ProcessResponse, ShowResponse
from pydantic import BaseModel

from banyan.chat_template.named_templates import FillIn
from banyan.config.schema import ServerConfig
from banyan.messages.requests import Constraint
from banyan.requests.generation import Finish, TextChunk, Usage
from banyan.requests.request_spec import RequestSpec
from tests.server.fakes import Site, refusal, steps
from tests.server.talk import TOOLS, USER, says, service_with
from tests.support.scripted import scripted

THOUGHT = "<think>\nWhy?\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
CALLED = [("get_weather", {"city": "東京"})]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT, GENERATE = "/api/chat", "/api/generate"
TYPES: dict[str, type[BaseModel]] = {CHAT: ChatResponse, GENERATE: GenerateResponse}
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
DOORS = pytest.mark.parametrize("path", [CHAT, GENERATE], ids=["chat", "generate"])
COUNTS = (
    *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
    *("prompt_eval_count", "eval_count"),
)


@pytest.fixture
def model(site: Site) -> Site:
    """A model that thinks and calls tools."""
    site.state.service = service_with(site)
    return site


@pytest.fixture
def client(site: Site) -> ollama.Client:
    return ollama.Client(host=site.url, timeout=60)


class Heard:
    """One answer as a client puts it together."""

    def __init__(self, path: str, lines: list[dict[str, object]]) -> None:
        parts = [line["message"] if path == CHAT else line for line in lines]
        text = "content" if path == CHAT else "response"
        self.text = "".join(part[text] for part in parts)
        self.thinking = "".join(part.get("thinking", "") for part in parts)
        calls = [call for part in parts for call in part.get("tool_calls", [])]
        self.calls = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
        self.logprobs = [score for line in lines for score in line.get("logprobs", [])]
        self.last = lines[-1]


def ask(site: Site, path: str, stream: bool, **fields: object) -> Heard:
    """The answer to one request; every line of it is checked."""
    shown = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    body = {"model": "tiny", **shown, "stream": stream, **fields}
    answer = httpx.post(site.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    kind = "application/x-ndjson" if stream else "application/json"
    assert answer.headers["content-type"] == kind
    lines = [json.loads(line) for line in answer.text.splitlines()]
    for line in lines:
        TYPES[path].model_validate(line, strict=True)
        assert line["model"] == "tiny"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(type(lines[-1][name]) is int and lines[-1][name] >= 0 for name in COUNTS)
    return Heard(path, lines)


ANSWERS = {
    "text": ({}, "Hello, 世界", ("Hello, 世界", "", [])),
    "thinking": ({"think": True}, THOUGHT + "So.", ("So.", "Why?", [])),
    "a call": ({"tools": TOOLS}, "See.\n" + CALL, ("See.", "", CALLED)),
    "calls": ({"tools": TOOLS}, THOUGHT + CALL + CALL, ("", "Why?", CALLED * 2)),
    "nothing": ({}, "", ("", "", [])),
}


@WAYS
@pytest.mark.parametrize("case", ANSWERS)
def test_every_kind_of_answer_whole_and_streamed(model: Site, case: str, stream: bool) -> None:
    fields, written, (text, thinking, calls) = ANSWERS[case]
    says(model, written, pieces=20)
    heard = ask(model, CHAT, stream, **fields)
    assert (heard.text, heard.thinking, heard.calls) == (text, thinking, calls)
    assert heard.last["done_reason"] == "stop"
    assert heard.last["prompt_eval_count"] == len(model.generator.asked[-1].prompt)
    assert heard.last["eval_count"] == len(written.encode())


@WAYS
def test_a_prompt_is_a_message_with_its_system_text(model: Site, stream: bool) -> None:
    says(model, THOUGHT + "So.", pieces=9)
    heard = ask(model, GENERATE, stream, system="S")
    assert (heard.text, heard.thinking) == ("So.", "Why?")
    assert shown(model) == "<|system|>S<|end|><|user|>Hi<|end|><|assistant|>"


@WAYS
def test_a_raw_prompt_has_no_template_and_its_answer_no_parser(model: Site, stream: bool) -> None:
    says(model, THOUGHT + CALL)
    heard = ask(model, GENERATE, stream, raw=True, prompt="<|user|>Hi")
    assert heard.text == THOUGHT + CALL
    assert shown(model) == "<|user|>Hi"


def test_without_a_template_a_prompt_is_raw(site: Site) -> None:
    site.state.service = replace(site.service, chat=None)
    ask(site, GENERATE, False)
    assert shown(site) == "Hi"


def test_a_suffix_is_filled_in_where_the_model_can(site: Site, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="suffix needs a server"):
        client.generate("tiny", "a", suffix="b")
    site.state.service = replace(site.service, fill_in=FillIn("<P>", "<M>", "<S>"))
    ask(site, GENERATE, False, prompt="a", suffix="b")
    assert shown(site) == "<P>a<M>b<S>"


def shown(site: Site) -> str:
    """The prompt that the model saw last."""
    return site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)


def test_a_conversation_with_calls_reaches_the_template(site: Site) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }}]{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }} {{ m.name }}){% endif %};{% endfor %}"
    )
    site.state.service = service_with(site, template)
    turns = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "thinking": "T", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1}}},
            {"id": "own", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    ]  # fmt: skip
    ask(site, CHAT, False, messages=turns)
    assert shown(site) == (
        "user::A;assistant:T:[call_1_0 f][own g];tool::2(own g);tool::1(call_1_0 f);"
    )


def test_a_last_message_of_the_assistant_is_continued(model: Site) -> None:
    ask(model, CHAT, False, messages=[*USER, {"role": "assistant", "content": "It is"}])
    assert shown(model).endswith("<|assistant|>It is")


@DOORS
def test_options_arrive_in_the_sampling(model: Site, path: str) -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.1, "seed": 5,
             "stop": ["END"], "num_predict": 9, "repeat_penalty": 1.5,
             "presence_penalty": 0.25, "frequency_penalty": 0.5}  # fmt: skip
    ask(model, path, False, options=given)
    asked = model.generator.asked[-1]
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.min_p, sampling.seed, sampling.max_new_tokens) == (0.1, 5, 9)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.25)
    assert (sampling.frequency_penalty, asked.text.stop) == (0.5, ("END",))


def test_what_is_off_in_ollama_is_off_here(model: Site) -> None:
    ask(model, CHAT, False, options={"num_predict": -1, "seed": -1, "top_k": 0, "mirostat": 0})
    asked = model.generator.asked[-1]
    assert asked.sampling.top_k == -1
    assert len(asked.prompt) + asked.sampling.max_new_tokens == 4096


@DOORS
def test_longer_answers_than_the_context_holds_end_there(model: Site, path: str) -> None:
    says(model, "Hel", finish=Finish("length"))
    heard = ask(model, path, False, options={"num_predict": 1_000_000})
    asked = model.generator.asked[-1]
    assert len(asked.prompt) + asked.sampling.max_new_tokens == 4096
    assert heard.last["done_reason"] == "length"


def test_what_is_not_honoured_is_reported(model: Site) -> None:
    body = {
        "model": "llama3.2:3b",
        "messages": [{**USER[0], "mood": "x"}],
        "stream": False,
        "keep_alive": "5m",
        "options": {"num_ctx": 2048, "mirostat": 2, "typical_p": 1.0, "colour": 1},
    }
    warned = httpx.post(model.url + CHAT, json=body).headers["x-banyan-warnings"]
    for name in ("keep_alive", "options.num_ctx", "options.mirostat", "options.colour", "llama3.2"):
        assert name in warned
    assert "messages.mood" in warned
    assert "typical_p" not in warned


@DOORS
@pytest.mark.parametrize(
    ("form", "schema"),
    [("json", {"type": "object"}), (SCHEMA, SCHEMA), ("", None)],
    ids=["json", "schema", "none"],
)
def test_a_format_binds_the_answer(
    model: Site, path: str, form: object, schema: dict[str, object] | None
) -> None:
    ask(model, path, False, format=form)
    grammar = model.generator.asked[-1].message.grammar
    assert (json.loads(Constraint.decode(grammar).text) if grammar else None) == schema


@pytest.mark.parametrize("think", [False, "none"])
def test_thinking_is_switched_off_in_the_template(model: Site, think: object) -> None:
    if think == "none":
        ask(model, CHAT, False, think="none")
        assert shown(model).endswith("<think></think>")
        return
    ask(model, GENERATE, False, think=False)
    assert shown(model).endswith("<think></think>")


@WAYS
@DOORS
def test_logprobs_come_with_their_tokens(model: Site, path: str, stream: bool) -> None:
    heard = ask(model, path, stream, logprobs=True, top_logprobs=2)
    assert [score["token"] for score in heard.logprobs] == list("Hello")
    assert all(len(score["top_logprobs"]) == 2 for score in heard.logprobs)


@WAYS
def test_a_call_that_is_cut_off_is_not_given(model: Site, stream: bool) -> None:
    says(model, CALL[:60], finish=Finish("length"))
    heard = ask(model, CHAT, stream, tools=TOOLS)
    assert (heard.calls, heard.last["done_reason"]) == ([], "length")


@DOORS
def test_asking_for_nothing_says_that_the_model_is_loaded(model: Site, path: str) -> None:
    body = {"model": "tiny", "keep_alive": 0}
    answer = httpx.post(model.url + path, json=body)
    TYPES[path].model_validate_json(answer.content, strict=True)
    assert answer.json()["done_reason"] == "load"
    assert "keep_alive" in answer.headers["x-banyan-warnings"]
    assert not model.generator.asked


def test_the_client_hears_the_same_whole_and_streamed(model: Site, client: ollama.Client) -> None:
    says(model, THOUGHT + "See.\n" + CALL, pieces=11)
    whole = client.chat("tiny", USER, tools=TOOLS).message
    lines = list(client.chat("tiny", USER, tools=TOOLS, stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.content == "See."
    assert "".join(line.message.thinking or "" for line in lines) == whole.thinking == "Why?"
    calls = [call for line in lines for call in line.message.tool_calls or []]
    assert calls == whole.tool_calls and len(calls) == 1
    says(model, "Hello", pieces=4)
    spoken = client.generate("tiny", "Hi", stream=True)
    assert "".join(line.response for line in spoken) == client.generate("tiny", "Hi").response


REFUSALS = {
    "images": (GENERATE, {"images": ["aGk="]}, "only supports text"),
    "images in a message": (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        "only supports text",
    ),
    "a template": (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    "a context": (GENERATE, {"context": [1, 2]}, "/api/chat"),
    "a raw system": (GENERATE, {"raw": True, "system": "S"}, "system"),
    "an unknown format": (CHAT, {"format": "xml"}, "format"),
    "a wrong option": (CHAT, {"options": {"temperature": "hot"}}, "temperature"),
    "a wrong penalty": (CHAT, {"options": {"repeat_penalty": -1}}, "repeat_penalty"),
    "a wrong effort": (CHAT, {"think": "hard"}, "think"),
    "a wrong role": (CHAT, {"messages": [{"role": "me", "content": "x"}]}, "role"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_requests_are_refused_in_one_line(model: Site, case: str) -> None:
    path, fields, words = REFUSALS[case]
    body = {"model": "tiny", "messages": USER} if path == CHAT else {"model": "tiny", "prompt": "x"}
    answer = httpx.post(model.url + path, json={**body, **fields})
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    assert words in answer.json()["error"]


def test_failures_are_errors_of_the_client(site: Site, client: ollama.Client) -> None:
    site.generator.script = lambda _: steps("", finish=refusal(503))
    with pytest.raises(ollama.ResponseError, match="refused by the engine") as failed:
        client.chat("tiny", USER)
    assert failed.value.status_code == 503
    site.generator.script = lambda _: steps("Hel", "", finish=refusal(500))
    with pytest.raises(ollama.ResponseError, match="refused by the engine"):
        list(client.chat("tiny", USER, stream=True))


def test_the_model_is_listed_and_runs(site: Site, client: ollama.Client, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    site.state.service = replace(
        site.service, model_config=replace(site.service.model_config, path=str(tmp_path))
    )
    (listed,) = client.list().models
    ListResponse.model_validate_json(httpx.get(site.url + "/api/tags").content)
    assert (listed.model, listed.size) == ("tiny", 1000)
    assert listed.details is not None and listed.details.family == "llama"
    (runs,) = client.ps().models
    ProcessResponse.model_validate_json(httpx.get(site.url + "/api/ps").content)
    assert (runs.model, runs.size, runs.context_length) == ("tiny", 1000, 4096)
    assert runs.digest == listed.digest and len(runs.digest or "") == 64


def test_the_model_shows_what_it_can(model: Site, client: ollama.Client) -> None:
    found: ShowResponse = client.show("tiny:latest")
    assert found.capabilities == ["completion", "tools", "thinking"]
    assert found.modelinfo is not None and found.modelinfo["llama.context_length"] == 4096
    assert found.details is not None and found.details.format == "safetensors"
    assert "add_generation_prompt" in (found.template or "")


def test_the_version_is_one_that_clients_can_compare(http: httpx.Client) -> None:
    parts = http.get("/api/version").json()["version"].split(".")
    assert len(parts) == 3 and all(part.isdigit() for part in parts)


def test_a_model_for_text_makes_no_vectors(client: ollama.Client) -> None:
    for ask_for in (lambda: client.embed("tiny", "x"), lambda: client.embeddings("tiny", "x")):
        with pytest.raises(ollama.ResponseError, match="--is-embedding") as refused:
            ask_for()
        assert refused.value.status_code == 501


class Embedder:
    """A model whose vectors are (number of tokens, 1) for every prompt."""

    def check(self, requests: Sequence[RequestSpec]) -> None:
        assert requests

    @scripted
    async def generate(self, request: RequestSpec) -> AsyncGenerator[TextChunk, None]:
        vector = array("f", [len(request.prompt), 1.0]).tobytes()
        usage = Usage(len(request.prompt), 0)
        yield TextChunk("", [], usage, finish=Finish("length"), vector=vector)


def test_vectors_come_in_the_order_of_the_texts(site: Site, client: ollama.Client) -> None:
    limits = replace(site.service.limits, is_embedding=True)
    site.state.service = replace(site.service, generator=Embedder(), limits=limits)
    several = client.embed("tiny", ["abc", "x"])
    assert several.embeddings == [[3.0, 1.0], [1.0, 1.0]]
    assert several.prompt_eval_count == 4
    assert client.embed("tiny", "abc").embeddings == [[3.0, 1.0]]
    assert client.embed("tiny", "abc", dimensions=1).embeddings == [[1.0]]
    assert client.embeddings("tiny", "abc").embedding == [3.0, 1.0]
    assert client.show("tiny").capabilities == ["embedding"]


def test_models_are_not_pulled_or_changed(client: ollama.Client) -> None:
    for ask_for in (
        lambda: client.pull("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
    ):
        with pytest.raises(ollama.ResponseError, match="one model") as refused:
            ask_for()
        assert refused.value.status_code == 501


def test_keys_and_strictness_hold_here_too() -> None:
    with Site(ServerConfig(api_key="right", strict_requests=True)).serving() as site:
        refused = httpx.get(site.url + "/api/tags")
        assert refused.status_code == 401 and list(refused.json()) == ["error"]
        client = ollama.Client(host=site.url, headers={"Authorization": "Bearer right"})
        assert client.chat("tiny", USER).message.content == "Hello"
        with pytest.raises(ollama.ResponseError, match="does not exist") as unknown:
            client.chat("llama3.2", USER)
        assert unknown.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="keep_alive"):
            client.chat("tiny", USER, keep_alive="5m")


def test_parameters_have_ollama_s_names_and_no_others(site: Site, http: httpx.Client) -> None:
    usual = {"temperature": 0.2, "repetition_penalty": 1.1, "max_new_tokens": None, "top_k": 5}
    site.state.service = replace(site.service, chat_defaults={**usual, "stream_interval": 1})
    shown = http.post("/api/show", json={"model": "tiny"}).json()["parameters"]
    assert sorted(shown.splitlines()) == ["repeat_penalty 1.1", "temperature 0.2", "top_k 5"]
    site.state.service = replace(site.service, chat_defaults={"max_new_tokens": 1024})
    shown = http.post("/api/show", json={"model": "tiny"}).json()["parameters"]
    assert shown == "num_predict 1024"


@pytest.mark.parametrize("truncate", [None, True, False])
def test_a_text_that_is_too_long_for_a_vector_is_cut_unless_that_is_forbidden(
    site: Site, http: httpx.Client, truncate: bool | None
) -> None:
    limits = replace(site.service.limits, is_embedding=True, context_length=16)
    site.state.service = replace(site.service, limits=limits)
    body = {"model": "tiny", "input": "a" * 40, "truncate": truncate}
    answer = http.post("/api/embed", json=body)
    if truncate is False:
        assert answer.status_code == 400
        return
    assert answer.status_code == 200, answer.text
    assert len(site.generator.asked[-1].prompt) == 16
    assert "input: texts are cut" in answer.headers["x-banyan-warnings"]
