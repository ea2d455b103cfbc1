"""Numbers as clients write them: whole numbers as floats, negative seeds, 0 where it has a meaning.

Clients in JavaScript and Go have one kind of number, and servers built on pydantic accept it."""

import httpx
import pytest

from tests.server.fakes import Site
from tests.server.talk import USER

# path: (body, whole numbers as floats, what of the request to the engine they become)
FLOATS = {
    "/v1/chat/completions": (
        {"messages": USER},
        {
            **{"max_tokens": 9.0, "seed": 5.0, "top_k": 7.0, "n": 1.0, "min_tokens": 2.0},
            **{"stop_token_ids": [7.0], "priority": 3.0, "logit_bias": {"5": 1}},
            **{"logprobs": True, "top_logprobs": 2.0},
        },
    ),
    "/v1/completions": (
        {"prompt": "Hi"},
        {
            **{"max_tokens": 9.0, "seed": 5.0, "top_k": 7.0, "n": 1.0, "best_of": 1.0},
            **{"min_tokens": 2.0, "stop_token_ids": [7.0], "priority": 3.0, "logprobs": 2.0},
        },
    ),
    "/v1/responses": (
        {"input": "Hi"},
        {"max_output_tokens": 9.0, "top_k": 7.0, "priority": 3.0, "top_logprobs": 2.0},
    ),
    "/v1/messages": (
        {"model": "tiny", "messages": USER},
        {
            **{"max_tokens": 9.0, "top_k": 7.0},
            "thinking": {"type": "enabled", "budget_tokens": 1024.0},
        },
    ),
    "/api/chat": (
        {"model": "tiny", "messages": USER, "stream": False, "logprobs": True},
        {"options": {"num_predict": 9.0, "seed": 5.0, "top_k": 7.0}, "top_logprobs": 2.0},
    ),
    "/generate": (
        {"text": "Hi"},
        {
            "sampling_params": {
                **{"max_new_tokens": 9.0, "sampling_seed": 5.0, "top_k": 7.0, "n": 1.0},
                **{"min_new_tokens": 2.0, "stop_token_ids": [7.0]},
            },
            **{"return_logprob": True, "top_logprobs_num": 2.0, "priority": 3.0},
        },
    ),
}


@pytest.mark.parametrize("path", FLOATS)
def test_a_whole_number_may_be_written_as_a_float(
    site: Site, http: httpx.Client, path: str
) -> None:
    body, floats = FLOATS[path]
    answer = http.post(path, json=body | floats)
    assert answer.status_code == 200, answer.text
    asked = site.generator.asked[-1]
    text = str(floats)
    assert asked.sampling.max_new_tokens == 9 and asked.sampling.top_k == 7
    assert "seed" not in text or asked.sampling.seed == 5
    assert "priority" not in text or asked.message.priority == 3
    assert "stop_token_ids" not in text or 7 in asked.sampling.stop_ids
    assert not ("logprobs" in text and "top" in text) or asked.message.score_top == 2


@pytest.mark.parametrize("path", FLOATS)
def test_a_fraction_is_no_whole_number(http: httpx.Client, path: str) -> None:
    body, _ = FLOATS[path]
    named = {
        "/v1/responses": {"max_output_tokens": 9.5},
        "/generate": {"sampling_params": {"max_new_tokens": 9.5}},
        "/api/chat": {"options": {"num_predict": 9.5}},
    }
    answer = http.post(path, json=body | named.get(path, {"max_tokens": 9.5}))
    assert answer.status_code == 400, answer.text


def seeds_of(path: str, seed: object) -> dict[str, object]:
    body = FLOATS[path][0]
    if path == "/generate":
        return {**body, "sampling_params": {"sampling_seed": seed}}
    return {**body, "options": {"seed": seed}} if path == "/api/chat" else {**body, "seed": seed}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/api/chat", "/generate"]
)
def test_a_seed_of_minus_one_is_drawn(site: Site, http: httpx.Client, path: str) -> None:
    for seed in (-1, -1.0, None):
        for _ in range(2):
            assert http.post(path, json=seeds_of(path, seed)).status_code == 200
        first, second = (one.sampling.seed for one in site.generator.asked[-2:])
        assert first >= 0 and first != second


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_another_negative_seed_repeats(site: Site, http: httpx.Client, path: str) -> None:
    for seed in (-2, -2, -3, -(2**63)):
        assert http.post(path, json=seeds_of(path, seed)).status_code == 200
    seeds = [one.sampling.seed for one in site.generator.asked[-4:]]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3 and min(seeds) >= 0


def test_no_token_may_be_wanted_where_a_text_is_scored(site: Site, http: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = site.generator.asked[-1].message
    assert message.sampling.max_new_tokens == 0 and message.score_from == 0
    assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 0}).status_code == 200


@pytest.mark.parametrize("path", FLOATS)
def test_a_top_k_of_zero_means_all(site: Site, http: httpx.Client, path: str) -> None:
    body, _ = FLOATS[path]
    named = {
        "/generate": {"sampling_params": {"top_k": 0}},
        "/api/chat": {"options": {"top_k": 0}},
    }
    fields = named.get(path, {"top_k": 0}) | ({"max_tokens": 9} if path == "/v1/messages" else {})
    answer = http.post(path, json=body | fields)
    assert answer.status_code == 200, answer.text
    assert site.generator.asked[-1].sampling.top_k == -1
