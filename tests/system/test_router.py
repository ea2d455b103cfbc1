"""A router in front of real servers, over real sockets: the same answers as without it, and what
its clients see of servers that are killed.
"""

import json
import os
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from tests.system.conftest import with_tiny_model
from tests.system.routing import launch_router, routing
from tests.system.serving import (
    Server,
    free_port,
    launch,
    serving,
    settled,
    wait_ready,
    wait_until,
)

FAST = ("--health-check-interval-secs", "0.2", "--worker-startup-check-interval", "0.2")
CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello there"}]}
LONG: dict = {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True}
MANY = [[at, at + 1] for at in range(3, 19)]
"""Prompts that take some seconds together."""


@pytest.fixture(scope="module")
def pair(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two servers on the tiny model that tests leave as they were."""
    logs = tmp_path_factory.mktemp("pair")
    flags = with_tiny_model(("--random-seed", "7"), tiny_model)
    with serving(logs / "a.log", *flags) as first, serving(logs / "b.log", *flags) as second:
        yield first, second


@pytest.fixture(scope="module")
def router(
    pair: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    urls = [server.url for server in pair]
    with routing(
        log, "--worker-urls", *urls, "--policy", "round_robin", "--enable-metrics", *FAST
    ) as it:
        yield it


REQUESTS = (
    (
        "/generate",
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9, "temperature": 0}},
    ),
    (
        "/generate",
        {
            "input_ids": [[5, 6, 7], [8, 9]],
            "sampling_params": {"max_new_tokens": 5, "temperature": 0.8, "sampling_seed": 4},
            "return_logprob": True,
        },
    ),
    (
        "/v1/completions",
        {"model": "default", "prompt": "one two", "max_tokens": 7, "temperature": 0},
    ),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 6, "temperature": 0}),
    ("/tokenize", {"prompt": "one two three"}),
    ("/generate", {"input_ids": []}),
    ("/v1/chat/completions", {"model": "default"}),
)


@pytest.mark.parametrize("path, body", REQUESTS, ids=lambda v: str(v)[:40])
def test_an_answer_is_that_of_a_server(
    router: Server, pair: tuple[Server, Server], path: str, body: dict
) -> None:
    for server in pair:
        direct = server.http.post(path, json=body)
        routed = router.http.post(path, json=body)
        assert routed.status_code == direct.status_code
        assert _timeless(routed.json()) == _timeless(direct.json())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_that_of_a_server(
    router: Server, pair: tuple[Server, Server], path: str
) -> None:
    body: dict = {"stream": True}
    if path == "/generate":
        body |= {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
    else:
        body |= {"model": "default", "max_tokens": 20, "temperature": 0, "prompt": "a b"}
        body |= CHAT if "chat" in path else {}
        body.pop("prompt" if "chat" in path else "messages", None)
    direct, routed = (_streamed(server, path, body) for server in (pair[0], router))
    assert len(str(direct)) > 20 and routed == direct


def test_requests_are_shared_out(router: Server, pair: tuple[Server, Server]) -> None:
    before = [settled(server.stats, 0)["finished"] for server in pair]
    for at in range(6):
        router.generate(input_ids=[at + 3], sampling_params={"max_new_tokens": 2})
    for server, had in zip(pair, before, strict=True):
        assert settled(server.stats, had + 3)["finished"] == had + 3


def test_a_client_that_leaves_ends_its_request_at_the_server(
    router: Server, pair: tuple[Server, Server]
) -> None:
    before = sum(settled(server.stats, 0)["output_tokens"] for server in pair)
    body = {"input_ids": MANY, "sampling_params": LONG, "stream": True}
    with router.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_bytes())

    def made_here() -> int:
        return sum(server.stats()["output_tokens"] for server in pair) - before

    wait_until(lambda: made_here() > 0, 60, "counters that know of it")
    after = [settled(server.stats, 0) for server in pair]
    assert all(stats["held_pages"] == 0 for stats in after)
    made = sum(stats["output_tokens"] for stats in after) - before
    assert 0 < made < len(MANY) * LONG["max_new_tokens"] / 2


def test_facts_are_of_all_servers(router: Server, pair: tuple[Server, Server]) -> None:
    facts = router.facts()
    assert len(facts["internal_states"]) == 2
    assert {w["url"] for w in facts["router"]["workers"]} == {server.url for server in pair}
    models = router.http.get("/v1/models").json()
    assert models["data"][0]["id"] == pair[0].http.get("/v1/models").json()["data"][0]["id"]
    assert router.http.post("/flush_cache").json()["success"] is True
    assert len(router.http.get("/v1/loads").json()["workers"]) == 2
    assert "sgl_router_active_workers 2.0" in router.http.get("/metrics").text


def test_a_pin_is_kept_by_every_server_that_a_request_may_go_to(
    router: Server, pair: tuple[Server, Server]
) -> None:
    prompt = [5 + 7 * at % 380 for at in range(50)]
    made = router.http.post("/pin_prefix", json={"input_ids": prompt, "ttl_s": 600}).json()
    assert made["success"] and not made["not_asked"] and "send it again" in made["later"]
    assert {reported["worker"] for reported in made["workers"]} == {server.url for server in pair}
    assert router.http.post("/flush_cache").json()["success"] is True
    for _ in range(2):  # round robin: one each
        asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        assert router.http.post("/generate", json=asked).json()["meta_info"]["cached_tokens"] == 48
    listed = router.http.get("/pinned_prefixes").json()["workers"]
    assert [reported["body"]["pins"][0]["pin"] for reported in listed] == [made["pin"]] * 2
    pair[1].http.post("/unpin_prefix", json={"pin": made["pin"]}).raise_for_status()
    gone = router.http.post("/unpin_prefix", json={"pin": made["pin"]})
    assert (gone.status_code, gone.json()["unpinned"]) == (200, 1), "one had let it go already"
    assert router.http.post("/unpin_prefix", json={"pin": made["pin"]}).status_code == 404
    refused = router.http.post("/pin_prefix", json={"input_ids": prompt, "ttl": 3})
    assert refused.status_code == 400 and "ttl" in refused.text
    listed = router.http.get("/pinned_prefixes").json()["workers"]
    assert [reported["body"]["pins"] for reported in listed] == [[], []]


def test_a_response_is_found_at_the_server_that_keeps_it(router: Server) -> None:
    asked = {"model": "default", "input": "one", "max_output_tokens": 3}
    made = [router.http.post("/v1/responses", json=asked).json()["id"] for _ in range(2)]
    for response in made * 2:
        assert router.http.get(f"/v1/responses/{response}").json()["id"] == response
    again = router.http.post("/v1/responses", json={**asked, "previous_response_id": made[0]})
    assert again.status_code == 200, again.text
    assert router.http.get("/v1/responses/resp_none").status_code == 404


def test_a_request_at_a_server_that_is_killed_is_answered_by_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = with_tiny_model((), tiny_model)
    with (
        serving(tmp_path / "a.log", *flags) as first,
        serving(tmp_path / "b.log", *flags) as second,
        routing(
            tmp_path / "router.log",
            *("--worker-urls", first.url, second.url, "--policy", "round_robin"),
            *("--worker-startup-check-interval", "0.2"),
        ) as router,
    ):
        wait_until(lambda: all(w["is_healthy"] for w in _workers(router)), 60, "both servers")
        os.kill(first.engine_pid(), signal.SIGSTOP)  # what it takes it never answers
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
            answers.append(httpx.post(f"{router.url}/generate", json=body, timeout=60))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        wait_until(lambda: len(answers) == 1, 60, "one answer")
        assert [w["load"] for w in _workers(router)] == [1, 0]
        os.killpg(first.pid, signal.SIGKILL)
        for thread in asking:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].json()["output_ids"] == answers[1].json()["output_ids"]
        for _ in range(4):
            router.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})


def test_a_stream_whose_server_is_killed_ends_with_one_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = with_tiny_model((), tiny_model)
    with (
        serving(tmp_path / "a.log", *flags) as server,
        routing(tmp_path / "router.log", "--worker-urls", server.url, *FAST) as router,
    ):
        body = {"input_ids": MANY, "sampling_params": LONG, "stream": True}
        events: list[str] = []
        with router.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                if len(events) == 3:
                    server.signal(signal.SIGKILL)
        assert events[-1] == "[DONE]"
        reported = [json.loads(event) for event in events[:-1]]
        errors = [event["error"] for event in reported if "error" in event]
        assert len(errors) == 1 and reported[-1]["error"] == errors[0]
        assert errors[0]["code"] == 503 and errors[0]["reason"] == "worker_lost"
        refused = router.http.post("/generate", json=body)
        assert refused.status_code == 503 and server.url in refused.json()["message"]
        assert router.http.get("/livez").status_code == 200
        wait_until(lambda: router.http.get("/readyz").status_code == 503, 60, "the loss to be seen")


def test_a_router_that_is_stopped_goes_on_and_one_that_is_killed_leaves_nothing(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    """Streams of a stopped router come whole when it goes on; those of a killed one end at the
    servers too, and a router in its place serves."""
    flags = ("--worker-urls", *(server.url for server in pair), *FAST)
    one = {"input_ids": [5, 6, 7], "sampling_params": LONG | {"max_new_tokens": 60}}
    right = pair[0].generate(**one)["text"]
    finished = [server.stats()["finished"] for server in pair]
    router = launch_router(tmp_path / "router.log", *flags)
    try:
        wait_ready(router)
        with ExitStack() as stack:
            streams = [stack.enter_context(_streaming(router, one)) for _ in range(6)]
            firsts = [next(lines) for lines in streams]
            router.signal(signal.SIGSTOP)
            for server, before in zip(pair, finished, strict=True):
                settled(server.stats, before)
            router.signal(signal.SIGCONT)
            for first, lines in zip(firsts, streams, strict=True):
                events = [first, *lines]
                assert events[-1] == "[DONE]"
                assert json.loads(events[-2])["text"] == right
        with ExitStack() as stack:
            many = {"input_ids": MANY, "sampling_params": LONG}
            lost = [stack.enter_context(_streaming(router, many)) for _ in range(2)]
            assert all(next(lines) for lines in lost)
            router.signal(signal.SIGKILL)
            for lines in lost:
                with pytest.raises(httpx.HTTPError):
                    list(lines)
        for server in pair:
            stats = settled(server.stats, 0)
            assert stats["leaked"] == 0 == stats["held_pages"]
        port = router.port
        router.kill()
        router = launch_router(tmp_path / "again.log", *flags, port=port)
        wait_ready(router)
        assert router.generate(**one)["text"] == right
    finally:
        router.signal(signal.SIGCONT)
        router.kill()


@contextmanager
def _streaming(router: Server, body: dict) -> Iterator[Iterator[str]]:
    """The events of a stream, as they come."""
    url = f"{router.url}/generate"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line)


def test_a_rolling_restart_of_all_servers_fails_no_request(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = with_tiny_model((), tiny_model)
    servers = [launch(tmp_path / f"{at}.log", *flags) for at in range(2)]
    urls = [server.url for server in servers]
    try:
        with routing(
            tmp_path / "router.log", "--worker-urls", *urls, "--policy", "power_of_two", *FAST
        ) as router:
            wait_until(lambda: all(w["is_healthy"] for w in _workers(router)), 60, "both")
            bodies: list[list[int]] = []
            failures: list[str] = []
            stopping = threading.Event()

            def ask() -> None:
                body = {"input_ids": [5, 6], "sampling_params": {**LONG, "max_new_tokens": 100}}
                with httpx.Client(timeout=60) as http:
                    while not stopping.is_set():
                        answer = http.post(f"{router.url}/generate", json=body)
                        if answer.status_code == 200:
                            bodies.append(answer.json()["output_ids"])
                        else:
                            failures.append(answer.text)

            asking = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asking:
                thread.start()
            for at, server in enumerate(servers):
                server.signal(signal.SIGTERM)
                assert server.exit_code(60) == 0
                server.kill()
                servers[at] = launch(tmp_path / f"{at}-again.log", *flags, port=server.port)
                wait_ready(servers[at])  # the router may not have seen that it was away
                wait_until(lambda: all(w["is_healthy"] for w in _workers(router)), 60, "it again")
            stopping.set()
            for thread in asking:
                thread.join()
            assert not failures and len(bodies) > 20 and len({tuple(body) for body in bodies}) == 1
    finally:
        for server in servers:
            server.kill()


def test_a_router_speaks_https_and_waits_for_servers(tmp_path: Path) -> None:
    authority = trustme.CA()
    pem = tmp_path / "router.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    router = launch_router(tmp_path / "router.log", "--tls-cert-path", str(pem))
    url = router.url.replace("http:", "https:")
    try:
        with httpx.Client(verify=trusting) as http:
            wait_until(lambda: _answers(http, f"{url}/livez"), 60, "the router")
            assert "there is no worker" in http.get(f"{url}/readyz").text
        router.signal(signal.SIGTERM)
        assert router.exit_code(60) == 0
    finally:
        router.kill()


def test_a_router_whose_servers_never_come_ends(tmp_path: Path) -> None:
    router = launch_router(
        tmp_path / "router.log",
        *("--worker-urls", f"http://127.0.0.1:{free_port()}"),
        *("--worker-startup-timeout-secs", "0.5", "--worker-startup-check-interval", "0.1"),
    )
    try:
        assert router.exit_code(60) == 5
        assert "nobody to ask after 0.5 s" in router.tail()
    finally:
        router.kill()


def test_a_router_starts_servers_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    flags = with_tiny_model((), tiny_model)
    with routing(
        tmp_path / "router.log", *flags, "--dp-size", "2", "--policy", "round_robin"
    ) as router:
        urls = router.http.get("/list_workers").json()["urls"]
        assert len(urls) == 2
        wait_until(lambda: all(w["is_healthy"] for w in _workers(router)), 60, "both")
        answers = [
            router.generate(
                input_ids=[7, 8], sampling_params={"max_new_tokens": 4, "temperature": 0}
            )
            for _ in range(2)
        ]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
        members = router.members()
        assert len(members) >= 2
        router.signal(signal.SIGTERM)
        assert router.exit_code(60) == 0
        wait_until(lambda: not router.members(), 60, "the servers to be gone")


def _streamed(server: Server, path: str, body: dict) -> object:
    """What the events of a stream come to; how many there are depends on the clock."""
    with server.http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    if path == "/generate":
        return _timeless(events[-1])  # each holds all so far
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    return "".join(text or "" for text in texts), choices[-1]["finish_reason"]


_CHANGES = (
    "id",
    "created",
    "e2e_latency",
    "queue_time",
    "ttft",
    "cached_tokens",
    "cache_miss",
    "decode_throughput",
)


def _timeless(value: object) -> object:
    """Without what differs from one run of a request to the next."""
    if isinstance(value, list):
        return [_timeless(item) for item in value]
    if isinstance(value, dict):
        return {
            name: _timeless(item)
            for name, item in value.items()
            if name not in _CHANGES and not name.endswith(("_time", "_latency", "_details", "_ts"))
        }
    return value


def _workers(router: Server) -> list[dict]:
    return router.http.get("/workers").json()["workers"]


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx.TransportError:
        return False
