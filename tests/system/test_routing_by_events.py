"""A router that hears what real servers' caches hold."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import with_tiny_model
from tests.system.routing import routing
from tests.system.serving import Server, free_port, serving, wait_until

WAIT_S = 60
FAST = ("--health-check-interval-secs", "0.2", "--worker-startup-check-interval", "0.2")
PROMPT = [(at * 7) % 400 + 5 for at in range(200)]
FEW = {"temperature": 0, "max_new_tokens": 2}


def events() -> tuple[str, str]:
    own = {"publisher": "zmq", "topic": "kv"}
    ports = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    return "--kv-events-config", json.dumps({**own, **ports})


@pytest.fixture(scope="module")
def scene(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server, Server]]:
    """Two servers, and a router that never balances by load."""
    logs = tmp_path_factory.mktemp("events")
    flags = with_tiny_model(("--page-size", "16"), tiny_model)
    with (
        serving(logs / "one.log", *flags, *events()) as one,
        serving(logs / "two.log", *flags, *events()) as two,
        routing(
            logs / "router.log",
            *("--worker-urls", one.url, two.url, "--follow-kv-events", *FAST),
        ) as router,
    ):
        yield one, two, router


def goes_to(router: Server, **body: object) -> int:
    """Which of its workers gets a request."""

    def taken() -> list[int]:
        return [w["requests"] for w in router.http.get("/workers").json()["workers"]]

    before = taken()
    router.generate(**body, sampling_params=FEW)
    (worker,) = (n for n, (was, now) in enumerate(zip(before, taken(), strict=True)) if now > was)
    return worker


def test_requests_go_where_their_prefix_lies_and_not_where_they_were_sent(
    scene: tuple[Server, Server, Server],
) -> None:
    *workers, router = scene
    text = "some of the words that are said here, and then more of them, over and over again; " * 3
    prompts = (
        {"input_ids": PROMPT},
        {"text": text},
        {"input_ids": [*PROMPT[50:], *PROMPT[:50]]},
        {"text": text[9:]},
    )
    for at, body in enumerate(prompts):
        for number in (at % 2, 1 - at % 2):  # a guess would stay with the first of them
            workers[number].generate(**body, sampling_params=FEW)  # behind the router's back

            def is_found(number: int = number, body: dict = body) -> bool:
                workers[1 - number].http.post("/flush_cache")
                return goes_to(router, **body) == number

            wait_until(is_found, WAIT_S, f"{str(body)[:40]} to go to worker {number}")
    assert "guessing" not in router.log.read_text()
