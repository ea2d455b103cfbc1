"""A router in front of real prefill and decode servers: the answers of one server, and what clients
see when either is killed.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import with_tiny_model
from tests.system.routing import routing
from tests.system.serving import Server, free_port, serving, settled, wait_until

FAST = ("--health-check-interval-secs", "0.2", "--worker-startup-check-interval", "0.2")
LONG = [(at * 7) % 400 + 5 for at in range(200)]


@pytest.fixture(scope="module")
def servers(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """One that does all, a prefill and a decode server, and a router before the two."""
    logs = tmp_path_factory.mktemp("pairs")
    port = str(free_port())
    both = with_tiny_model(("--random-seed", "7"), tiny_model)
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
    with (
        serving(logs / "alone.log", *both) as alone,
        serving(logs / "prefill.log", *both, *prefill) as first,
        serving(logs / "decode.log", *both, "--disaggregation-mode", "decode") as second,
        routing(
            logs / "router.log",
            *("--pd-disaggregation", "--prefill", first.url, port, "--decode", second.url),
            *FAST,
        ) as router,
    ):
        yield {"alone": alone, "prefill": first, "decode": second, "router": router}


GREEDY = {"max_new_tokens": 12, "temperature": 0}
REQUESTS = (
    ("/generate", {"input_ids": LONG, "sampling_params": GREEDY}),
    (
        "/generate",
        {
            "input_ids": [LONG, LONG[:50], [5]],
            "sampling_params": {"max_new_tokens": 6, "temperature": 0.9, "sampling_seed": 3},
        },
    ),
    (
        "/v1/completions",
        {"model": "default", "prompt": ["one two", "three"], "max_tokens": 7, "temperature": 0},
    ),
    (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": 6,
            "temperature": 0,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": "what time is it"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "now",
                        "parameters": {"type": "object", "maxProperties": 0},
                    },
                }
            ],
            "tool_choice": "required",
            "max_tokens": 40,
            "temperature": 0,
        },
    ),
)


@pytest.mark.parametrize("path, body", REQUESTS, ids=lambda v: str(v)[:30])
def test_a_pair_answers_as_one_server(servers: dict[str, Server], path: str, body: dict) -> None:
    routed, direct = (servers[name].http.post(path, json=body) for name in ("router", "alone"))
    assert (routed.status_code, direct.status_code) == (200, 200), routed.text
    assert _said(routed.json()) == _said(direct.json())


def test_a_pair_streams_what_one_server_does(servers: dict[str, Server]) -> None:
    body = {"input_ids": LONG, "sampling_params": GREEDY, "stream": True}
    with servers["router"].http.stream("POST", "/generate", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    whole = servers["alone"].generate(input_ids=LONG, sampling_params=GREEDY)
    assert json.loads(lines[-2])["output_ids"] == whole["output_ids"]


def test_both_servers_are_left_with_nothing(servers: dict[str, Server]) -> None:
    for name in ("prefill", "decode"):
        stats = settled(servers[name].stats, 1)
        assert stats["held_pages"] == 0 == stats["leaked"]


def test_a_request_is_refused_as_by_one_server(servers: dict[str, Server]) -> None:
    body = {"input_ids": [5], "sampling_params": {"temperature": -1}}
    routed, direct = (
        servers[name].http.post("/generate", json=body) for name in ("router", "alone")
    )
    assert routed.status_code == direct.status_code == 400
    assert routed.json()["message"] == direct.json()["message"]


def test_a_prefill_server_that_is_killed_is_replaced_by_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    ports = [str(free_port()) for _ in range(2)]
    both = with_tiny_model((), tiny_model)
    prefill = [
        (*both, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
        for port in ports
    ]
    with (
        serving(tmp_path / "p.log", *prefill[0]) as first,
        serving(tmp_path / "q.log", *prefill[1]) as second,
        serving(tmp_path / "d.log", *both, "--disaggregation-mode", "decode") as decode,
        routing(
            tmp_path / "router.log",
            *("--pd-disaggregation", "--policy", "round_robin", "--decode", decode.url),
            *("--prefill", first.url, ports[0], "--prefill", second.url, ports[1], *FAST),
        ) as router,
    ):
        workers = router.http.get("/workers").json()["workers"]
        assert len(workers) == 3
        wait_until(lambda: all(w["is_healthy"] for w in _workers(router)), 60, "all three")
        os.kill(first.engine_pid(), signal.SIGSTOP)  # what it takes it never answers
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"input_ids": LONG, "sampling_params": GREEDY}
            answers.append(httpx.post(f"{router.url}/generate", json=body, timeout=60))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        wait_until(lambda: len(answers) == 1, 60, "one answer")
        os.killpg(first.pid, signal.SIGKILL)
        for thread in asking:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
        assert answers[0].json()["output_ids"] == answers[1].json()["output_ids"]
        wait_until(lambda: not all(w["is_healthy"] for w in _workers(router)), 60, "the loss")
        assert router.http.get("/readyz").status_code == 200
        stats = settled(decode.stats, 2)
        assert stats["held_pages"] == 0 == stats["leaked"]


def _workers(router: Server) -> list[dict]:
    return router.http.get("/workers").json()["workers"]


def _said(answer: object) -> object:
    """What an answer says, without ids, times and counters."""
    if isinstance(answer, list):
        return [_said(part) for part in answer]
    assert isinstance(answer, dict)
    if "choices" not in answer:
        return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]
    return [
        (
            *(c["index"], c["finish_reason"]),
            c.get("text") or c.get("message", {}).get("content"),
            [call["function"] for call in c.get("message", {}).get("tool_calls") or ()],
        )
        for c in answer["choices"]
    ]
