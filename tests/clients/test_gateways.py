"""Gateways of others in front of our servers, started with their published flags.

Each lives in an environment of its own (`make test-clients`); without it its tests are skipped.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import CLIENTS
from tests.system.checkpoint import write_tiny_model
from tests.system.conftest import with_tiny_model
from tests.system.handing import Servers, servers
from tests.system.serving import (
    READY_S,
    Server,
    free_port,
    launch,
    serving,
    settled,
    wait_until,
)

START_S = 90.0
GREEDY = {"max_new_tokens": 8, "temperature": 0}
GATEWAYS = {
    "sglang-router": ("-m", "sglang_router.launch_router"),
    "smg": ("-m", "smg.cli", "launch"),
    "vllm-router": ("-m", "vllm_router.launch_router"),
}
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("gateways")
    model = write_tiny_model(folder / "model")
    flags = with_tiny_model(("--served-model-name", "default"), model)
    with serving(folder / "a.log", *flags) as first, serving(folder / "b.log", *flags) as second:
        yield first, second


@pytest.fixture(scope="module", params=GATEWAYS)
def gateway(
    request: pytest.FixtureRequest,
    pair: tuple[Server, Server],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """One gateway over both servers, once it lists them as healthy."""
    words = ["--worker-urls", *(server.url for server in pair)]
    with started(request.param, words, tmp_path_factory.mktemp("gateway")) as http:
        yield http


@contextlib.contextmanager
def started(
    gateway: str, words: list[str], folder: Path, num_workers: int = 2
) -> Iterator[httpx.Client]:
    home = CLIENTS / gateway
    if not (home / ".installed").exists():
        pytest.skip(f"{gateway} is not installed: make test-clients")
    port = free_port()
    command = [str(home / "bin" / "python"), *GATEWAYS[gateway], *words]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port())]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    try:
        wait_until(
            lambda: _healthy(http, process, log) == num_workers, START_S, "the gateway's workers"
        )
        yield http
    finally:
        http.close()
        process.kill()
        process.wait()


def test_requests_are_answered_as_by_a_server_itself(
    gateway: httpx.Client, pair: tuple[Server, Server]
) -> None:
    for path, body, answer_of in (
        ("/generate", {"text": "one two", "sampling_params": GREEDY}, lambda a: a["text"]),
        ("/v1/chat/completions", CHAT, lambda a: a["choices"][0]["message"]["content"]),
        (
            "/v1/completions",
            {"model": "default", "prompt": "one two", "max_tokens": 8, "temperature": 0},
            lambda a: a["choices"][0]["text"],
        ),
    ):
        direct = pair[0].http.post(path, json=body)
        assert direct.status_code == 200, direct.text
        for _ in pair:
            routed = gateway.post(path, json=body)
            assert routed.status_code == 200, routed.text
            assert answer_of(routed.json()) == answer_of(direct.json())


def test_streams_come_through(gateway: httpx.Client, pair: tuple[Server, Server]) -> None:
    text = pair[0].http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
    with gateway.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"] for line in lines[:-1]]
    got = "".join(choice["delta"].get("content") or "" for some in deltas for choice in some)
    assert got == text["content"]


def test_both_servers_get_requests(gateway: httpx.Client, pair: tuple[Server, Server]) -> None:
    before = [settled(server.stats, 0)["finished"] for server in pair]
    for at in range(6):
        body = {"text": f"number {at}", "sampling_params": GREEDY}
        assert gateway.post("/generate", json=body).status_code == 200
    after = [
        settled(server.stats, had + 1)["finished"] for server, had in zip(pair, before, strict=True)
    ]
    assert sum(after) - sum(before) == 6


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int]]:
    """A server with --grpc-mode: its model, and its ports for gRPC and HTTP."""
    folder = tmp_path_factory.mktemp("grpc")
    model, port = write_tiny_model(folder / "model"), free_port()
    flags = ("--served-model-name", "default", "--grpc-mode")
    flags += ("--grpc-http-sidecar-port", str(port))
    server = launch(folder / "log", *with_tiny_model(flags, model))
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}/readyz"), READY_S, "the server")
        yield model, server.port, port
    finally:
        server.kill()


def test_200_requests_over_grpc_give_the_tokens_of_http(
    grpc_server: tuple[Path, int, int], tmp_path: Path
) -> None:
    model, port, http_port = grpc_server
    words = ["--worker-urls", f"grpc://127.0.0.1:{port}", "--model-path", str(model)]
    bodies = [
        {**CHAT, "messages": [{"role": "user", "content": f"hello {at}"}]} for at in range(200)
    ]
    sidecar = httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=60)
    with started("smg", words, tmp_path, num_workers=1) as http, ThreadPoolExecutor(16) as pool:
        # The gateway lists the worker before it has loaded the tokenizer.
        wait_until(
            lambda: http.post("/v1/chat/completions", json=CHAT).status_code != 503,
            START_S,
            "the gateway's tokenizer",
        )
        expected = list(pool.map(lambda body: _content(sidecar, body), bodies))
        ways = [_content, _streamed, _aborted]
        got = list(pool.map(lambda at: ways[at % 3](http, bodies[at]), range(len(bodies))))
        for at, text in enumerate(got):
            if at % 3 == 2:
                same = min(len(whole(text)), len(whole(expected[at])))
                assert text[:same] == expected[at][:same], (at, text, expected[at])
            else:
                assert whole(text) == whole(expected[at]), (at, text, expected[at])
    assert len(set(expected)) > 20, "the prompts must differ in their answers"
    stats = settled(lambda: _stats(sidecar), 0)
    assert stats["output_tokens"] < 400 * 66 / 2, "closed streams went on to their end"
    assert _content(sidecar, bodies[0]) == expected[0]


def _content(http: httpx.Client, body: dict[str, object]) -> str:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return answer.json()["choices"][0]["message"]["content"]


def _streamed(http: httpx.Client, body: dict[str, object]) -> str:
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"] for line in lines[:-1]]
    return "".join(choice["delta"].get("content") or "" for some in deltas for choice in some)


def _aborted(http: httpx.Client, body: dict[str, object]) -> str:
    """Close a long stream after its first text, and return that text."""
    long = {**body, "stream": True, "max_tokens": 400, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=long) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if text := choice["delta"].get("content"):
                        return text
    return ""


def _stats(http: httpx.Client) -> dict[str, int]:
    return http.get("/get_server_info").json()["internal_states"][0]["stats"]


def whole(text: str) -> str:
    """The text without an unfinished character at its end, which the gateway leaves out."""
    return text.rstrip("\ufffd")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One that computes prompts, and one that continues them."""
    folder = tmp_path_factory.mktemp("sharing")
    model = write_tiny_model(folder / "model")
    with servers(folder, model, "--served-model-name", "default") as found:
        yield found


@pytest.mark.parametrize("gateway", ["sglang-router", "smg"])
def test_prompts_and_answers_have_servers_of_their_own(
    gateway: str, sharing: Servers, pair: tuple[Server, Server], tmp_path: Path
) -> None:
    words = ["--pd-disaggregation", "--prefill", sharing.prefill.url, str(sharing.port)]
    words += ["--decode", sharing.decode.url]
    long = {"text": "one two " * 40, "sampling_params": GREEDY}
    with started(gateway, words, tmp_path) as http:
        before = settled(sharing.decode.stats, 0)["finished"]
        for path, body, answer_of in (
            ("/generate", long, lambda a: a["text"]),
            ("/v1/chat/completions", CHAT, lambda a: a["choices"][0]["message"]["content"]),
        ):
            direct = pair[0].http.post(path, json=body).json()
            for _ in range(2):
                routed = http.post(path, json=body)
                assert routed.status_code == 200, routed.text
                assert answer_of(routed.json()) == answer_of(direct)
        assert settled(sharing.decode.stats, before + 4)["finished"] == before + 4


def _healthy(http: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> int:
    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    with contextlib.suppress(httpx.TransportError, ValueError):
        answer = http.get("/workers")
        if answer.status_code == 200:
            return sum(bool(w.get("is_healthy")) for w in answer.json()["workers"])
    return 0
