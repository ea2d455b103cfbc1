"""/metrics of a real server agrees with what its clients received."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.checkpoint import write_tiny_model
from tests.system.serving import serving, wait_until

SAMPLING = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), 1)
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ("--threads", "1", "--max-total-tokens", "16384", "--enable-metrics")
    with serving(log, "--model-path", str(folder), *flags) as running:
        yield running


def figures(server) -> dict[str, float]:
    """Summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def ask(server, number: int) -> dict[str, int]:
    """One request, streamed or whole; what the client received about it."""
    body = {
        "text": f"Request {number % 5} asks for a few words. " * (1 + number % 3),
        "sampling_params": {**SAMPLING, "max_new_tokens": 1 + number % 7},
        "stream": number % 2 == 1,
    }
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200
    if not body["stream"]:
        return answer.json()["meta_info"]
    last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    return json.loads(last.removeprefix("data: "))["meta_info"]


def test_counts_are_exactly_what_clients_saw(server):
    before = figures(server)
    with ThreadPoolExecutor(4) as pool:
        reported = list(pool.map(lambda n: ask(server, n), range(24)))
    after = figures(server)

    def grown(name):
        return after[name] - before[name]

    assert grown("num_requests_total") == grown("e2e_request_latency_seconds_count") == 24
    assert grown("num_aborted_requests_total") == 0
    assert grown("prompt_tokens_total") == sum(m["prompt_tokens"] for m in reported)
    assert grown("generation_tokens_total") == sum(m["completion_tokens"] for m in reported)
    assert grown("cached_tokens_total") == sum(m["cached_tokens"] for m in reported) > 0
    assert grown("time_to_first_token_seconds_count") == 24
    tokens = sum(m["completion_tokens"] for m in reported)
    assert 0 < grown("inter_token_latency_seconds_count") <= tokens - 24  # some come with the first
    waits = grown("time_to_first_token_seconds_sum") + grown("inter_token_latency_seconds_sum")
    assert 0 < waits <= grown("e2e_request_latency_seconds_sum")


def test_a_client_who_leaves_is_counted_as_aborted(server):
    before = figures(server)
    body = {"text": "Go on.", "sampling_params": {**SAMPLING, "max_new_tokens": 2000}}
    with server.http.stream("POST", "/generate", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        next(stream.iter_lines())

    def is_counted():
        return figures(server)["num_aborted_requests_total"] > before["num_aborted_requests_total"]

    wait_until(is_counted, 60, "the abort is counted")
    assert figures(server)["num_requests_total"] == before["num_requests_total"] + 1


def test_gauges_come_from_the_engine(server):
    found = figures(server)
    assert found["max_total_num_tokens"] == 16384
    assert found["page_size"] > 0
    assert found["kv_available_tokens"] + found["kv_evictable_tokens"] <= 16384 + found["page_size"]


def test_nothing_that_clients_say_becomes_a_label(server):
    def series() -> set[str]:
        lines = server.http.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    message = {"role": "user", "content": "sesame"}
    path, body = "/v1/chat/completions", {"messages": [message], "max_tokens": 1}
    server.http.post(path, json=body | {"model": "sesame"})
    server.http.post(path, json=body | {"model": "sesame", "max_tokens": -1})
    before = series()
    for number in range(50):
        named = {"model": f"sesame-{number}", "user": f"sesame-{number}"}
        assert server.http.post(path, json=body | named).status_code == 200
        assert server.http.post(path, json=body | named | {"max_tokens": -1}).status_code == 400
        assert server.http.get(f"/sesame/{number}").status_code == 404
    assert series() == before and not [line for line in before if "sesame" in line]
