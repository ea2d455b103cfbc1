"""Constrained answers of the demo model through the server: valid, ended, and no harm to others."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest

from tests.support.pools import ServerPool
from tests.system.serving import Server, serving, settled, wait_until

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "population"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
AS_CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def with_backend(name: str) -> tuple[str, ...]:
    return ("--model-path", "demo", "--grammar-backend", name, "--check-ledger")


@pytest.fixture
def constrained(demo_model: object, server_pool: ServerPool) -> Iterator[Server]:
    """The demo model with the backend that every installation has."""
    with server_pool.borrow(*with_backend("llguidance")) as running:
        yield running


def chat(server: Server, **fields: object) -> list[dict]:
    """The choices of one request that must succeed."""
    messages = [{"role": "user", "content": "Describe Paris as JSON."}]
    body = {"messages": messages, "max_tokens": 100, "seed": 3, **fields}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def refusal(server: Server, **fields: object) -> str:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["message"]


def test_every_choice_follows_the_schema_and_ends(constrained: Server):
    for choice in chat(constrained, response_format=AS_CITY, n=3, temperature=1.5):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


@pytest.mark.parametrize("choice", ["required", "describe_city"])
@pytest.mark.parametrize("question", ["What is the weather in Rome?", "Describe Paris.", "Hello!"])
def test_a_model_that_never_calls_by_itself_does_where_it_must(
    constrained: Server, choice: str, question: str
):
    described = {"name": "describe_city", "parameters": CITY}
    weather = {"name": "get_weather", "parameters": WEATHER}
    named = {"type": "function", "function": {"name": choice}}
    (answer,) = chat(
        constrained,
        messages=[{"role": "user", "content": question}],
        tools=[{"type": "function", "function": f} for f in (weather, described)],
        tool_choice=choice if choice == "required" else named,
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert choice in ("required", call["function"]["name"])
    schema = CITY if call["function"]["name"] == "describe_city" else WEATHER
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_a_stream_is_the_same_text(constrained: Server):
    (whole,) = chat(constrained, response_format=AS_CITY)
    body = {
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "max_tokens": 100,
        "seed": 3,
        "response_format": AS_CITY,
        "stream": True,
    }
    with constrained.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [x.removeprefix("data: ") for x in answer.iter_lines() if x.startswith("data: {")]
    deltas = [json.loads(x)["choices"][0]["delta"] for x in lines]
    assert "".join(d.get("content") or "" for d in deltas) == whole["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"regex": "(yes|no)"}, {"yes", "no"}),
        ({"ebnf": 'root ::= "on" | "off"'}, {"on", "off"}),
        ({"guided_choice": ["a.b", "c|d"]}, {"a.b", "c|d"}),
        ({"regex": "(yes|no)", "ignore_eos": True}, {"yes", "no"}),
    ],
)
def test_every_notation_is_followed(
    constrained: Server, fields: dict[str, object], allowed: set[str]
):
    (choice,) = chat(constrained, **fields)
    assert choice["message"]["content"] in allowed and choice["finish_reason"] == "stop"


def test_a_required_tag_comes_first(constrained: Server):
    content = {"type": "json_schema", "json_schema": CITY}
    form = {
        "type": "triggered_tags",
        "triggers": ["<city>"],
        "tags": [{"type": "tag", "begin": "<city>", "content": content, "end": "</city>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    tag = {"type": "structural_tag", "format": form}
    (choice,) = chat(constrained, response_format=tag)
    text = choice["message"]["content"]
    assert text.startswith("<city>") and text.endswith("</city>")
    jsonschema.validate(json.loads(text[len("<city>") : -len("</city>")]), CITY)


def test_the_native_route_takes_the_same_constraints(constrained: Server):
    answer = constrained.generate(
        text="The year is", sampling_params={"regex": "[0-9]{4}", "max_new_tokens": 16}
    )
    assert len(answer["text"]) == 4 and answer["text"].isdigit()


NAMES = {
    "type": "object",
    "properties": {
        "identification_number_of_the_station": {"type": "integer", "maximum": 99, "minimum": 0},
        "is_open_to_visitors_in_the_evening": {"type": "boolean"},
    },
    "required": ["identification_number_of_the_station", "is_open_to_visitors_in_the_evening"],
    "additionalProperties": False,
}


def test_what_is_forced_is_not_sampled_and_stays_the_same(constrained: Server):
    """A request for log-probabilities samples every token, so it shows what a jump must equal."""

    def ask(**fields: object) -> tuple[dict, int]:
        before = settled(constrained.stats, 0)
        sampling = {"json_schema": json.dumps(NAMES), "max_new_tokens": 90, "temperature": 0}
        answer = constrained.generate(text="A station:", sampling_params=sampling, **fields)
        after = settled(constrained.stats, before["finished"] + 1)
        return answer, after["steps"] - before["steps"]

    sampled, many = ask(return_logprob=True)
    jumped, few = ask()
    assert jumped["text"] == sampled["text"] and jumped["output_ids"] == sampled["output_ids"]
    jsonschema.validate(json.loads(jumped["text"]), NAMES)
    for answer in (sampled, jumped):
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    assert few < many - 5, (few, many)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_constrained_answer_is_the_same_however_the_steps_fall(
    demo_model: object, server_pool: ServerPool, backend: str
):
    """What is forced can be written in several ways, and a jump may come sooner or later."""
    body = {
        "text": "A station:",
        "sampling_params": {"json_schema": json.dumps(NAMES), "max_new_tokens": 90},
    }
    body["sampling_params"]["temperature"] = 0
    with server_pool.borrow(*with_backend(backend)) as server:
        alone = server.generate(**body)["output_ids"]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: server.generate(**body)["output_ids"], range(24)))
        assert [ids for ids in found if ids != alone] == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_a_jump_does_not_go_past_the_last_token(constrained: Server, length: int):
    sampling = {"json_schema": json.dumps(NAMES), "max_new_tokens": length, "temperature": 0}
    answer = constrained.generate(text="A station:", sampling_params=sampling)
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == length
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": length}


def test_a_jump_ends_at_a_stop(constrained: Server):
    sampling = {"json_schema": json.dumps(NAMES), "max_new_tokens": 90, "temperature": 0}
    whole = constrained.generate(text="A station:", sampling_params=sampling)
    stop_at = whole["output_ids"][4]
    by_id = constrained.generate(
        text="A station:", sampling_params=sampling | {"stop_token_ids": [stop_at]}
    )
    assert by_id["output_ids"] == whole["output_ids"][: whole["output_ids"].index(stop_at) + 1]
    by_text = constrained.generate(text="A station:", sampling_params=sampling | {"stop": "_of_"})
    assert by_text["text"] == whole["text"].partition("_of_")[0]


def test_forced_retraction_does_not_disturb_a_constraint(demo_model: object, tmp_path_factory):
    log = tmp_path_factory.mktemp("tight") / "server.log"
    flags = ("--grammar-backend", "llguidance", "--max-total-tokens", "256", "--check-ledger")
    with serving(log, "--model-path", "demo", *flags) as server:
        schema = {"type": "array", "items": CITY, "minItems": 2, "maxItems": 3}
        form = {"type": "json_schema", "json_schema": {"name": "cities", "schema": schema}}
        choices = chat(server, response_format=form, n=4, temperature=1.2, max_tokens=110)
        for choice in choices:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        wait_until(lambda: server.stats()["held_pages"] == 0, 60, "the pages to be let go")
        assert server.stats()["leaked"] == 0


def test_what_cannot_be_compiled_is_a_400_with_the_reason(constrained: Server):
    assert "unclosed" in refusal(constrained, regex="[")
    assert "not" in refusal(constrained, guided_json={"not": {"type": "null"}})
    assert "only references within" in refusal(constrained, guided_json={"$ref": "http://x/y"})
    deep: dict[str, object] = {}
    for _ in range(500):
        deep = {"items": deep}
    assert "levels deep" in refusal(constrained, guided_json=deep)


def test_a_hostile_constraint_does_not_change_what_others_get(constrained: Server):
    canary = {"text": "One two three", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    alone = constrained.generate(**canary)["text"]
    statuses: list[int] = []

    def attack() -> None:
        enum = {"enum": [f"{i:06d}" for i in range(20_000)]}
        for fields in ({"regex": "(.*a){80}b(x{1,900}){1,900}"}, {"guided_json": enum}):
            body = {"prompt": "x", "max_tokens": 2, **fields}
            statuses.append(constrained.http.post("/v1/completions", json=body).status_code)

    attacker = threading.Thread(target=attack)
    attacker.start()
    beside = constrained.generate(**canary)["text"]
    attacker.join(60)
    assert beside == alone
    assert len(statuses) == 2 and set(statuses) <= {200, 400}
    assert constrained.stats()["leaked"] == 0


def test_without_a_backend_a_constraint_is_refused(server):
    with server("--grammar-backend", "none") as running:
        answer = running.http.post(
            "/generate", json={"input_ids": [5, 6], "sampling_params": {"regex": "a"}}
        )
        assert answer.status_code == 400 and "grammar backend" in answer.text


def test_an_unknown_backend_is_refused_at_start(server):
    with (
        pytest.raises(AssertionError, match=r"ended with code 2"),
        server("--grammar-backend", "banana"),
    ):
        pass


def long_schema(name: str, count: int) -> dict[str, object]:
    """Takes a part of a second to compile."""
    names = [f"{name}_{i}" for i in range(count)]
    properties = dict.fromkeys(names, {"type": "integer"})
    return {"type": "object", "properties": properties, "required": names}


def test_schemas_of_one_key_do_not_hold_up_those_of_another(server):
    """The second key's schema is the longest, and of one key the shortest goes first."""
    with server("--api-key", "alice bob", "--grammar-backend", "llguidance") as running:
        ended: list[str] = []

        def ask(key: str, schema: dict[str, object]) -> None:
            params = {"max_new_tokens": 1, "json_schema": json.dumps(schema)}
            body = {"input_ids": [5, 6], "sampling_params": params}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{running.url}/generate", json=body, headers=headers, timeout=60)
            ended.append(key if answer.status_code == 200 else answer.text)

        with ThreadPoolExecutor(8) as pool:
            many = [pool.submit(ask, "alice", long_schema(f"a{i}", 2_000)) for i in range(8)]
            wait_until(lambda: ended != [], 60, "the first schema to be compiled")
            ask("bob", long_schema("b", 2_500))
            done_before = ended.index("bob")
        assert all(one.done() for one in many) and ended.count("alice") == 8, ended
        assert done_before <= 4, ended
