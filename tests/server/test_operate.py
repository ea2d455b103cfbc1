"""What operators ask and change while the server runs: loads, pauses, logging, cloud forms."""

import httpx
import pytest

from banyan.engine_client.client import Replica
from banyan.engine_client.request_log import RequestLog
from banyan.messages.events import Reply, Stats
from tests.server.fakes import READY, Site


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("abort", ["pause", "abort_all"]),
        ("retract", ["pause"]),
        ("in_place", ["pause"]),
    ],
)
def test_a_pause_is_not_ready_until_it_ends(site: Site, http: httpx.Client, mode, calls) -> None:
    answer = http.post("/pause_generation", json={"mode": mode})
    assert answer.json()["status"] == "ok" and site.client.calls == calls
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    assert http.post("/continue_generation").json()["status"] == "ok"
    assert site.client.calls == [*calls, "resume"]
    assert http.get("/ready").status_code == 200


def test_an_unknown_mode_of_a_pause_is_refused(http: httpx.Client) -> None:
    answer = http.post("/pause_generation", json={"mode": "sleep"})
    assert answer.status_code == 400 and "in_place" in answer.json()["message"]


def test_loads_have_the_sections_that_are_asked_for(http: httpx.Client) -> None:
    body = http.get("/v1/loads").json()
    (load,) = body["loads"]
    assert load["num_running_reqs"] == 2 and load["num_waiting_reqs"] == 1
    assert load["num_used_tokens"] == 64 and load["max_total_num_tokens"] == 8192
    assert load["memory"]["token_capacity"] == 8192
    assert load["disaggregation"] == {"mode": "null"}
    (core,) = http.get("/v1/loads", params={"include": "core"}).json()["loads"]
    assert "memory" not in core and core["utilization"] == 2 / 8
    assert http.get("/v1/loads", params={"dp_rank": 3}).json()["loads"] == []


def test_loads_can_be_prometheus_text(http: httpx.Client) -> None:
    text = http.get("/v1/loads", params={"format": "prometheus"}).text
    assert 'banyan_load_num_running_reqs{dp_rank="0"} 2' in text.splitlines()
    assert 'banyan_load_memory_token_capacity{dp_rank="0"} 8192' in text.splitlines()


def test_each_living_replica_has_a_load_of_its_own(site: Site, http: httpx.Client) -> None:
    busy = Stats(running=1, held_pages=1)
    site.client.others = [Replica(1, False, READY, busy), Replica(2, True, READY, busy)]
    loads = http.get("/v1/loads").json()["loads"]
    reported = [
        (load["dp_rank"], load["num_running_reqs"], load["num_used_tokens"]) for load in loads
    ]
    assert reported == [(0, 2, 64), (2, 1, 16)]
    (load,) = http.get("/v1/loads", params={"dp_rank": 2}).json()["loads"]
    assert load["max_total_num_tokens"] == 8192 and load["memory"]["token_capacity"] == 8192
    lines = http.get("/v1/loads", params={"format": "prometheus"}).text.splitlines()
    assert lines.count("# TYPE banyan_load_num_running_reqs gauge") == 1
    assert 'banyan_load_num_running_reqs{dp_rank="2"} 1' in lines
    assert [load["dp_rank"] for load in http.get("/get_load").json()] == [0, 2]


@pytest.mark.parametrize("query", [{"include": "core,gpu"}, {"format": "xml"}, {"rank": "1"}])
def test_what_loads_do_not_know_is_refused(http: httpx.Client, query: dict[str, str]) -> None:
    assert http.get("/v1/loads", params=query).status_code == 400


def test_the_log_of_requests_is_switched_on_and_off(site: Site, http: httpx.Client) -> None:
    for is_on in (True, True, False):
        assert http.post("/configure_logging", json={"log_requests": is_on}).status_code == 200
        assert site.state.service is not None
        assert isinstance(site.state.service.generator, RequestLog) is is_on
        assert http.post("/generate", json={"text": "a"}).json()["text"] == "Hello"


@pytest.mark.parametrize("body", [{"log_level": "loud"}, {"dump_requests_folder": "/x"}])
def test_what_cannot_be_logged_is_refused(http: httpx.Client, body: dict[str, str]) -> None:
    answer = http.post("/configure_logging", json=body)
    assert answer.status_code == 400 and next(iter(body)) in answer.json()["message"]


def test_the_version_is_printed(site: Site, http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": site.state.version}


def test_vertex_instances_are_answered_in_order(site: Site, http: httpx.Client) -> None:
    body = {
        "instances": [{"text": "a"}, {"text": "bc"}],
        "parameters": {"sampling_params": {"max_new_tokens": 4}},
    }
    found = http.post("/vertex_generate", json=body).json()["predictions"]
    assert [p["text"] for p in found] == ["Hello", "Hello"]
    assert [p["meta_info"]["prompt_tokens"] for p in found] == [1, 2]
    assert site.generator.asked[-1].sampling.max_new_tokens == 4


@pytest.mark.parametrize(
    "instances", [[], None, ["a"], [{"text": "a"}, {"input_ids": [1]}], [{"text": "a", "x": 1}]]
)
def test_other_vertex_instances_are_refused(http: httpx.Client, instances: object) -> None:
    answer = http.post("/vertex_generate", json={"instances": instances})
    assert answer.status_code == 400 and "instances" in answer.json()["message"]


def test_sagemaker_pings_and_invokes(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/invocations", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"


def test_replicas_try_before_they_release_memory(site: Site, http: httpx.Client) -> None:
    site.client.others = [Replica(1, True, READY, Stats())]
    http.post("/release_memory_occupation")
    assert site.client.calls == ["pause", "try_release_memory", "release_memory", "resume"]
    http.post("/resume_memory_occupation")
    site.client.calls.clear()
    site.client.reply = Reply(1, False, "1 running")
    assert http.post("/release_memory_occupation").status_code == 400
    assert site.client.calls == ["pause", "try_release_memory", "resume"]


def test_released_memory_is_reported_until_it_is_resumed(site: Site, http: httpx.Client) -> None:
    assert http.get("/release_memory_occupation").content == b""
    assert site.client.calls == ["release_memory"]
    assert "kv_cache, weights" in http.get("/ready").text
    answer = http.post("/resume_memory_occupation", json={"tags": ["weights", "cuda_graph"]})
    assert "no cuda_graph" in answer.headers["x-banyan-warnings"]
    assert "kv_cache" in http.get("/ready").text
    http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("tags", [["tables"], "weights", [1], ["weights"] * 17])
def test_only_what_there_is_can_be_released(site: Site, http: httpx.Client, tags) -> None:
    assert http.post("/release_memory_occupation", json={"tags": tags}).status_code == 400
    assert not site.client.calls
