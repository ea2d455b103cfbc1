"""The smaller routes: health, models, tokens, facts, orders, and what is not available."""

import itertools
import json
from dataclasses import replace

import httpx
import pytest
from msgspec.structs import replace as replace_struct

from banyan.base.clock import VirtualClock
from banyan.config.cli import name_of
from banyan.config.flags.table import GROUPS
from banyan.engine_client.client import Health, Replica
from banyan.messages.events import Reply, Stats
from banyan.server.routes import unavailable_routes
from banyan.server.state import SharedProbe
from tests.server.fakes import READY, Site

STUCK = Health(True, True, False, "A step has been running for 400.0 s.")


def test_health_answers_200_with_no_body(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/ready", "/ping", "/health_generate"])
def test_a_serving_server_is_well_on_every_health_route(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/readyz", "/ready", "/ping"])
def test_a_stuck_engine_is_a_503_with_the_reason(site: Site, http: httpx.Client, path: str) -> None:
    site.client.now = STUCK
    answer = http.get(path)
    assert answer.status_code == 503 and "400.0 s" in answer.text
    assert http.get("/livez").status_code == 200


def test_who_asks_for_a_token_again_gets_the_answer_of_before(
    site: Site, http: httpx.Client
) -> None:
    site.state.probe = SharedProbe(VirtualClock())
    assert [http.get("/health_generate").status_code for _ in range(5)] == [200] * 5
    assert len(site.generator.asked) == 1


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_stuck_engine_takes_no_request(site: Site, http: httpx.Client, path: str) -> None:
    site.client.now = STUCK
    body = {"text": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = http.post(path, json=body)
    assert answer.status_code == 503 and "400.0 s" in answer.text
    assert "retry-after" in answer.headers and not site.generator.asked
    facts = http.get("/get_server_info")
    assert facts.status_code == 200 and facts.json()["status"] == "not ready"


def test_before_the_engine_is_ready_the_process_lives_and_refuses_work(
    site: Site, http: httpx.Client
) -> None:
    site.state.service = None
    try:
        assert http.get("/livez").status_code == 200
        assert http.get("/readyz").status_code == 503
        assert http.get("/health").status_code == 503
        refused = http.post("/generate", json={"text": "a"})
    finally:
        site.state.service = site.service
    assert refused.status_code == 503 and "retry-after" in refused.headers


def test_draining_refuses_new_work_but_is_healthy(site: Site, http: httpx.Client) -> None:
    site.state.draining = True
    assert http.get("/readyz").status_code == 503
    assert http.get("/health").status_code == 200
    refused = http.post("/generate", json={"text": "a"})
    assert refused.status_code == 503 and "retry-after" in refused.headers


def test_the_model_is_listed_and_found_by_name(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny" and listed["data"][0]["max_model_len"] == 4096
    assert listed["data"][0]["owned_by"] == "sglang", "by which smg knows what a pair understands"
    assert http.get("/v1/models/tiny").json() == listed["data"][0]


def test_another_model_does_not_exist(http: httpx.Client) -> None:
    answer = http.get("/v1/models/other/name")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model 'other/name' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_goes_to_ids_and_back(http: httpx.Client, prefix: str) -> None:
    found = http.post(f"{prefix}/tokenize", json={"prompt": "aé"}).json()
    assert found["count"] == 3 and found["max_model_len"] == 4096
    back = http.post(f"{prefix}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"text": "aé"}


def test_batches_of_texts_and_ids_answer_as_lists(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert found["count"] == [1, 2]
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"text": ["a", "bc"]}


def test_messages_are_tokenised_as_chat_does(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["count"] == 5
    bare = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert bare.json()["count"] == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": 3}),
    ],
)
def test_bad_token_requests_are_400(http: httpx.Client, path: str, body: object) -> None:
    assert http.post(path, json=body).status_code == 400


def test_flushing_says_what_the_engine_said(site: Site, http: httpx.Client) -> None:
    answer = http.post("/flush_cache")
    assert answer.status_code == 200 and answer.text.startswith("Cache flushed.")
    site.client.reply = Reply(1, False, "Cache not flushed: 1 running.")
    try:
        assert http.get("/flush_cache").status_code == 400
    finally:
        site.client.reply = Reply(1, True, "Cache flushed.")
    assert site.client.calls == ["flush_cache", "flush_cache"]


def test_abort_ends_a_request_and_all_its_sequences_by_its_whole_name(
    site: Site, http: httpx.Client
) -> None:
    site.generator.hold_after = 1
    body = {"text": ["a", "b"], "stream": True, "rid": "job"}
    with http.stream("POST", "/generate", json=body) as open_:
        lines = open_.iter_lines()
        next(lines)
        for other in ("j", "job_", "other", "ob", "job_1x", "_0"):
            assert http.post("/abort_request", json={"rid": other}).json() == {"aborted": 0}
        assert http.post("/abort_request", json={"rid": "job"}).json() == {"aborted": 2}
        assert http.post("/abort_request", json={"rid": "job_1"}).json() == {"aborted": 1}
    assert sorted(site.client.aborted) == ["job_0", "job_1", "job_1"]


def test_abort_without_a_name_is_refused(http: httpx.Client) -> None:
    assert http.post("/abort_request", json={}).status_code == 400


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_tells_what_is_served(http: httpx.Client, path: str) -> None:
    body = http.get(path).json()
    assert body["is_generation"] is True
    assert body["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_each_setting_once_under_the_name_of_its_flag(
    site: Site, http: httpx.Client, path: str
) -> None:
    body = http.get(path).json()
    for _, flags in GROUPS:
        for flag in flags:
            assert (name_of(flag) in body) == (not flag.name.endswith(("api-key", "password"))), (
                flag.name
            )
    assert body["model_path"] == "tiny" and body["served_model_name"] == "tiny"
    assert body["page_size"] == 16 and body["tp_size"] == 1 and body["dtype"] == "auto"
    assert body["disable_overlap_schedule"] is False and body["stream_interval"] == 1
    assert not {"source", "radix", "depth", "backend", "timeout_s", "max_running"} & body.keys()
    (state,) = body["internal_states"]
    assert not state.keys() & body.keys()


def test_server_info_has_what_tools_of_sglang_read(site: Site, http: httpx.Client) -> None:
    memory = {"weight_bytes": 3 << 30, "cache_bytes": 1 << 30, "process_bytes": 5 << 30}
    facts = json.dumps({"memory": memory, "settings": {"a.b": 1}, "phases": {"x": 1.0}}).encode()
    ready = replace_struct(READY, facts=facts)
    site.client.others = [Replica(1, True, ready, Stats(running=5))]
    site.state.service = replace(site.service, ready=ready)
    try:
        body = http.get("/server_info").json()
    finally:
        site.client.others = []
    assert body["status"] == "ready" and body["max_total_num_tokens"] == 8192
    assert body["max_req_input_len"] == 4095 and body["version"] and body["kv_events"] is None
    first, second = body["internal_states"]
    assert first["memory_usage"]["weight"] == 0.0 and first["stats"]["running"] == 2
    assert second["stats"]["running"] == 5
    assert second["effective_max_running_requests_per_dp"] == 8
    assert second["memory_usage"] == {
        "weight": 3.0,
        "kvcache": 1.0,
        "graph": 0.0,
        "token_capacity": 8192,
    }
    assert body["facts"] == {"memory": memory}


def test_load_is_a_list_with_one_entry_per_rank(http: httpx.Client) -> None:
    assert http.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 64}
    ]


def test_known_routes_that_are_missing_say_so(http: httpx.Client) -> None:
    for route in unavailable_routes():
        answer = http.request(route.methods[0], route.path)
        assert answer.status_code == 501, route.path
        assert answer.json()["message"].endswith("."), route.path


def test_an_unknown_route_is_404_and_a_wrong_method_405(http: httpx.Client) -> None:
    assert http.get("/nope").status_code == 404
    answer = http.get("/generate")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST, PUT"


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    answer = http.head("/")
    assert answer.status_code == 200 and answer.content == b""


def test_every_route_takes_the_seeds_that_requests_lack_from_one_source(
    site: Site, http: httpx.Client
) -> None:
    numbers = itertools.count(5)
    site.state.service = replace(site.service, draw_seed=lambda: next(numbers))
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    http.post("/v1/completions", json={"prompt": "a"})
    http.post("/generate", json={"text": "a"})
    assert [request.sampling.seed for request in site.generator.asked] == [5, 6, 7]


def test_every_route_names_itself_for_the_log(site: Site, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    http.post("/v1/completions", json={"prompt": "a"})
    http.post("/generate", json={"text": "a"})
    http.get("/health_generate")
    routes = [request.route for request in site.generator.asked]
    assert routes == ["chat", "completion", "generate", "probe"]
