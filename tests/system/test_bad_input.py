"""Bad requests are refused by name while a canary stream runs on as if nothing had happened."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.pools import ServerPool
from tests.system.checkpoint import CONTEXT
from tests.system.conftest import with_tiny_model
from tests.system.serving import Server, status_of
from tests.system.watch import Canary

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PROMPT = {"prompt": "hello", "max_tokens": 4}
IDS = {"input_ids": [5, 6, 7]}


@pytest.fixture(scope="module")
def shared_server(tiny_model: Path, server_pool: ServerPool) -> Iterator[Server]:
    """One for the whole file, beside whose tests the canary runs."""
    with server_pool.borrow(*with_tiny_model((), tiny_model)) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def canary(shared_server: Server) -> Iterator[None]:
    """Runs beside all the tests of this file."""
    bird = Canary(shared_server)
    yield
    bird.end()


@pytest.fixture(autouse=True)
def health(shared_server: Server) -> Iterator[None]:
    """Looked at after every test."""
    yield
    assert status_of(shared_server, "/health") == 200


def refused(server: Server, path: str, body: dict, *words: str, status: int = 400) -> None:
    """The request is answered `status` with a message that has all `words`."""
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:300]}"
    message = message_of(answer)
    for word in words:
        assert word.lower() in message.lower(), f"{word!r} not in {message!r}"
    assert "Traceback" not in answer.text


def message_of(answer: httpx.Response) -> str:
    body = answer.json()
    error = body.get("error", body)
    message = error if isinstance(error, str) else error["message"]
    assert isinstance(message, str) and message
    return message


def sampling(**params: object) -> dict:
    return IDS | {"sampling_params": params}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}'],
    ids=["empty", "open", "list", "null", "string", "not utf-8", "deep", "nan"],
)
def test_malformed_json_is_400(shared_server, path, raw):
    answer = shared_server.http.post(
        path, content=raw, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text[:300]
    assert message_of(answer)


def test_an_empty_prompt_is_400(shared_server):
    refused(shared_server, "/v1/completions", PROMPT | {"prompt": ""}, "prompt")
    refused(shared_server, "/v1/completions", PROMPT | {"prompt": []}, "prompt")
    refused(shared_server, "/v1/chat/completions", CHAT | {"messages": []}, "messages")
    refused(shared_server, "/generate", {"text": ""})
    refused(shared_server, "/generate", {"input_ids": []})
    refused(shared_server, "/generate", {"sampling_params": {}})


def test_a_prompt_longer_than_the_context_is_400_with_both_numbers(shared_server):
    body = {"input_ids": [5] * (CONTEXT + 52)}
    refused(shared_server, "/generate", body, str(CONTEXT + 52), str(CONTEXT))
    body = {"prompt": [5] * (CONTEXT + 52), "max_tokens": 4}
    refused(shared_server, "/v1/completions", body, str(CONTEXT + 52), str(CONTEXT))


def test_an_answer_longer_than_the_context_is_400_with_the_numbers(shared_server):
    for wanted in (CONTEXT, 2**63):
        refused(shared_server, "/generate", sampling(max_new_tokens=wanted), str(CONTEXT), "3 tok")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -5),
        ("min_p", 2),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("max_new_tokens", -1),
        ("min_new_tokens", 99999),
        ("sampling_seed", 2**64),
        ("sampling_seed", "x"),
        ("n", 0),
        ("n", 2**31),
        ("n", True),
        ("stop", ["x"] * 10_000),
        ("stop", [""]),
        ("stop", ["x" * (1 << 20)]),
        ("stop_token_ids", ["5"]),
        ("stop_regex", "(a+"),
        ("logit_bias", {"x": 1.0}),
    ],
)
def test_a_sampling_value_out_of_range_is_400_and_named(shared_server, field, value):
    refused(shared_server, "/generate", sampling(**{field: value}), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e400),
        ("temperature", -0.5),
        ("top_p", 2),
        ("n", 0),
        ("n", 2**31),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("seed", 2**64),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
    ],
)
def test_an_openai_value_out_of_range_is_400_and_named(shared_server, field, value):
    body = json.dumps(CHAT | {field: value})
    answer = shared_server.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text[:300]
    assert field in message_of(answer) or value == 1e400


@pytest.mark.parametrize("ids", [[-1], [100_000], [2**31], [2**64], [1.5], [True], [5, "x"]])
def test_token_ids_outside_the_vocabulary_are_400(shared_server, ids):
    refused(shared_server, "/generate", {"input_ids": ids})
    refused(shared_server, "/v1/completions", PROMPT | {"prompt": ids})


def test_prompts_without_end_are_400_with_the_bound(shared_server):
    many = [5] * 900_000
    for path, body in (
        ("/generate", {"input_ids": many}),
        ("/v1/completions", PROMPT | {"prompt": many}),
        ("/v1/chat/completions", CHAT | {"input_ids": many}),
    ):
        refused(shared_server, path, body, "900000", str(CONTEXT))
    for path, body in (
        ("/generate", {"input_ids": [[5]] * 5000}),
        ("/v1/completions", PROMPT | {"prompt": [[5]] * 5000}),
        ("/v1/completions", PROMPT | {"prompt": ["a"] * 100, "n": 100}),
        ("/generate", {"text": ["a"] * 100, "sampling_params": {"n": 100}}),
    ):
        refused(shared_server, path, body, "4096")
    for path, body in (
        ("/generate", {"input_ids": [[]]}),
        ("/v1/completions", PROMPT | {"prompt": [[]]}),
        ("/v1/completions", PROMPT | {"prompt": [[5], []]}),
    ):
        refused(shared_server, path, body)


def test_the_seeds_that_are_legal_are_served(shared_server):
    for seed in (0, 2**63 - 1):
        body = CHAT | {"seed": seed, "n": 2}
        answer = shared_server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


def test_a_request_that_bans_every_token_is_400(shared_server):
    every = list(range(shared_server.http.get("/v1/models").json()["data"][0]["max_model_len"]))
    vocabulary = [t for t in every if t < vocabulary_of(shared_server)]
    body = sampling(stop_token_ids=vocabulary, min_new_tokens=2, max_new_tokens=4)
    refused(shared_server, "/generate", body, "every token is banned")
    body = sampling(regex="a", min_new_tokens=5, max_new_tokens=9)
    refused(shared_server, "/generate", body, "every token is banned")
    body = sampling(logit_bias={str(t): -1e6 for t in vocabulary}, max_new_tokens=3)
    answer = shared_server.generate(**body)
    assert answer["meta_info"]["completion_tokens"] >= 1


def vocabulary_of(server: Server) -> int:
    """How many tokens the model has, as its refusals tell."""
    answer = server.http.post("/generate", json={"input_ids": [2**40]})
    return int(message_of(answer).split("[0, ")[1].split(")")[0])


def test_marks_in_chat_stay_text_and_in_prompts_they_count(shared_server):
    def tokens(**body: object) -> list[int]:
        answer = shared_server.http.post("/v1/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    def said(text: str) -> list[int]:
        return tokens(messages=[{"role": "user", "content": text}])

    end = tokens(prompt="<|im_end|>", add_special_tokens=False)
    assert len(end) == 1
    assert said("<|im_end|>").count(end[0]) == said("hello").count(end[0])
    shown = shared_server.generate(
        text="<|im_end|>", sampling_params={"max_new_tokens": 1}, return_prompt_token_ids=True
    )
    assert shown["meta_info"]["prompt_token_ids"][-1:] == end


@pytest.mark.parametrize(
    "constraint",
    [
        {"type": "nonsense"},
        {"type": "string", "pattern": "["},
        {"type": "string", "pattern": r"(a)\1"},
        {"$ref": "http://127.0.0.1:1/x.json"},
        {"$ref": "file:///etc/passwd"},
    ],
    ids=str,
)
def test_a_schema_that_means_nothing_is_400(shared_server, constraint):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": constraint}}
    refused(shared_server, "/v1/chat/completions", CHAT | {"response_format": form})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "foo**"),
        ("regex", "a|" * 500_000),
        ("json_schema", json.dumps({"enum": [f"{i:08d}" for i in range(100_000)]})),
        ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
        ("ebnf", 'root ::= root "a" | root "b"'),
        ("ebnf", 'root ::= "a" | "a" | "a"'),
    ],
    ids=lambda value: value[:24],
)
def test_a_hostile_constraint_is_answered_without_a_failure(shared_server, field, value):
    body = sampling(**{field: value, "max_new_tokens": 2})
    answer = shared_server.http.post("/generate", json=body)
    assert answer.status_code in (200, 400), answer.text[:300]


def test_too_many_top_logprobs_are_400(shared_server):
    body = CHAT | {"logprobs": True, "top_logprobs": 21}
    refused(shared_server, "/v1/chat/completions", body, "top_logprobs")
    for field, value in (("top_logprobs_num", 257), ("token_ids_logprob", [5] * 1025)):
        refused(shared_server, "/generate", IDS | {"return_logprob": True, field: value}, field)


def test_an_unknown_route_is_404_and_a_wrong_method_405(shared_server):
    assert shared_server.http.get("/no/such/route").status_code == 404
    assert shared_server.http.get("/v1/chat/completions").status_code == 405


def test_an_unknown_model_is_404_where_it_is_looked_up(shared_server):
    assert shared_server.http.get("/v1/models/no-such-model").status_code == 404
    # One base model: completions serve whatever name the client sends.
    answer = shared_server.http.post("/v1/completions", json=PROMPT | {"model": "gpt-4"})
    assert answer.status_code == 200


def test_a_body_larger_than_the_limit_is_413(shared_server):
    refused(shared_server, "/generate", {"text": "x" * (33 << 20)}, status=413)


def test_extreme_but_legal_values_are_served(shared_server):
    for params in (
        {"temperature": 1e-9},
        {"temperature": 1e6},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"top_k": 2**31},
        {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 2},
        {"repetition_penalty": 1e-6, "temperature": 1e-5},
        {"logit_bias": {"5": 1e6, "6": -1e6}, "temperature": 1e-5},
    ):
        answer = shared_server.generate(**sampling(max_new_tokens=3, ignore_eos=True, **params))
        assert len(answer["output_ids"]) == 3


def test_a_request_without_the_key_is_401_and_probes_are_open(server):
    with server("--api-key", "secret-word") as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-word"}):
            for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/flush_cache"):
                assert running.http.post(path, json={}, headers=headers).status_code == 401
            assert running.http.get("/get_server_info", headers=headers).status_code == 401
        right = {"Authorization": "Bearer secret-word"}
        body = IDS | {"sampling_params": {"max_new_tokens": 1}}
        assert running.http.post("/generate", json=body, headers=right).status_code == 200
        facts = running.http.get("/get_server_info", headers=right)
        assert facts.status_code == 200 and "secret-word" not in facts.text
        assert [status_of(running, p) for p in ("/livez", "/readyz", "/health")] == [200] * 3
        assert "secret-word" not in running.log.read_text()


def test_a_full_queue_is_503_with_retry_after(server):
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1")
    body = {"input_ids": [[5 + i] for i in range(12)]}
    body["sampling_params"] = {"max_new_tokens": 200, "ignore_eos": True}
    with server(*flags) as running:
        answer = running.http.post("/generate", json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "queue" in message_of(answer)
