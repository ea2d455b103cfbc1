"""/generate over HTTP: whole, cumulative and batched answers, and its errors."""

import json
from dataclasses import replace

import httpx

from tests.server.fakes import Site, refusal, steps
from tests.support.flags import config_of


def post(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/generate", json={"text": "ab", **fields})


def stream(http: httpx.Client, **fields: object) -> list[dict]:
    answer = post(http, stream=True, **fields)
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], answer.text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_an_answer_has_text_ids_and_meta_info(http: httpx.Client) -> None:
    body = post(http).json()
    assert body["text"] == "Hello" and len(body["output_ids"]) == 5
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 256}
    assert body["meta_info"]["prompt_tokens"] == 2


def test_a_stream_is_cumulative(http: httpx.Client) -> None:
    assert [c["text"] for c in stream(http)] == ["Hel", "Hello"]


def test_a_batch_answers_as_a_list(http: httpx.Client) -> None:
    assert [a["text"] for a in post(http, text=["a", "b"]).json()] == ["Hello", "Hello"]


def test_fields_without_effect_are_in_header_and_body(http: httpx.Client) -> None:
    answer = post(http, frobnicate=1)
    assert "frobnicate" in answer.headers["x-banyan-warnings"]
    assert answer.json()["meta_info"]["not_honoured"] == ["frobnicate"]


def test_ids_that_no_token_has_are_reported_in_the_header(http: httpx.Client) -> None:
    answer = post(http, sampling_params={"stop_token_ids": [999_999], "logit_bias": {"-1": 1}})
    assert answer.status_code == 200
    assert answer.headers["x-banyan-warnings"] == (
        "stop_token_ids: no token of [0, 261) has the id [999999]; "
        "logit_bias: no token of [0, 261) has the id [-1]"
    )


def test_errors_have_the_native_message(http: httpx.Client) -> None:
    answer = post(http, sampling_params={"temperature": -1})
    assert answer.status_code == 400
    assert "temperature must be" in answer.json()["error"]["message"]


def test_zero_new_tokens_are_legal_here(site: Site, http: httpx.Client) -> None:
    assert post(http, sampling_params={"max_new_tokens": 0}).status_code == 200
    assert site.generator.asked[-1].sampling.max_new_tokens == 0


def test_a_failure_in_a_stream_is_its_last_event(site: Site, http: httpx.Client) -> None:
    site.generator.script = lambda _: steps("Hel", "", finish=refusal(503))
    error = stream(http)[-1]["error"]
    assert (error["code"], error["retryable"]) == (503, True)


def test_a_live_request_id_cannot_be_taken(site: Site, http: httpx.Client) -> None:
    site.generator.hold_after = 1
    body = {"text": "a", "stream": True, "rid": "one"}
    with http.stream("POST", "/generate", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        answer = post(http, rid="one")
    assert answer.json()["error"]["message"] == "Duplicate request ID detected: one"


def test_a_session_sends_its_history_to_the_engine(site: Site, http: httpx.Client) -> None:
    name = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    params = {"id": name}
    first = post(http, session_params=params).json()
    earlier = site.generator.asked[-1].prompt + first["output_ids"]
    later = {"id": name, "rid": first["meta_info"]["id"]}
    chunks = stream(http, text="cd", session_params=later)
    assert site.generator.asked[-1].prompt == earlier + site.tokenizer.encode("cd")
    last = {"id": name, "rid": chunks[-1]["meta_info"]["id"]}
    post(http, text="e", session_params=last)
    assert len(site.generator.asked[-1].prompt) == len(earlier) + 2 + 5 + 1
    assert http.post("/close_session", json={"session_id": name}).status_code == 200
    assert post(http, session_params=params).status_code == 400


def test_an_open_session_cannot_be_opened_again(http: httpx.Client) -> None:
    body = {"capacity_of_str_len": 10, "session_id": "mine"}
    assert http.post("/open_session", json=body).json() == "mine"
    assert http.post("/open_session", json=body).status_code == 400
    assert http.get("/close_session", params={"session_id": "mine"}).status_code == 200
    assert http.post("/open_session", json=body | {"streaming": True}).status_code == 400


def test_a_streaming_session_needs_its_flag_and_only_appends(
    site: Site, http: httpx.Client
) -> None:
    body = {"capacity_of_str_len": 100, "session_id": "live", "streaming": True}
    refused = http.post("/open_session", json=body)
    assert refused.status_code == 400 and "--enable-streaming-session" in refused.text
    config, allowed = site.state.config, config_of("--enable-streaming-session").server
    site.state.config = replace(
        config, server=replace(config.server, streaming_sessions=allowed.streaming_sessions)
    )
    try:
        assert http.post("/open_session", json=body).json() == "live"
        params = {"id": "live"}
        first = post(http, session_params=params).json()["output_ids"]
        earlier = site.generator.asked[-1].prompt + first
        assert post(http, session_params=params, sampling_params={"n": 2}).status_code == 400
        stream(http, text="cd", session_params=params)
        assert site.generator.asked[-1].prompt == earlier + site.tokenizer.encode("cd")
    finally:
        site.state.config = config
