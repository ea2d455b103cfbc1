"""What one key has made, another neither sees, continues nor ends."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.fakes import Site, steps
from tests.support.flags import config_of

ALICE = {"authorization": "Bearer alice-key"}
BOB = {"authorization": "Bearer bob-key"}
ADMIN = {"authorization": "Bearer the-admin"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    flags = ["--api-key", "alice-key bob-key", "--admin-api-key", "the-admin"]
    config = config_of(*flags, "--file-storage-path", str(tmp_path / "kept")).server
    with Site(config).serving() as served:
        yield served


def test_a_session_belongs_to_the_key_that_opened_it(site: Site) -> None:
    opened = {"capacity_of_str_len": 1000, "session_id": "talk"}
    assert site.http.post("/open_session", json=opened, headers=ALICE).status_code == 200
    turn = {"text": "SECRET", "rid": "first", "session_params": {"id": "talk"}}
    assert site.http.post("/generate", json=turn, headers=ALICE).status_code == 200
    later = {"text": "b", "session_params": {"id": "talk", "rid": "first"}}
    refused = site.http.post("/generate", json=later, headers=BOB)
    assert refused.status_code == 400 and "not open" in refused.text
    closed = site.http.post("/close_session", json={"session_id": "talk"}, headers=BOB)
    assert closed.status_code == 200
    assert site.http.post("/generate", json=later, headers=ALICE).status_code == 200
    assert "SECRET" in site.tokenizer.decode(site.generator.asked[-1].prompt)


def test_a_response_belongs_to_the_key_that_asked_for_it(site: Site) -> None:
    body = {"model": "tiny", "input": "SECRET", "request_id": "resp_known"}
    made = site.http.post("/v1/responses", json=body, headers=ALICE)
    assert made.status_code == 200 and made.json()["id"] == "resp_known"
    for method, path in (
        ("GET", "/v1/responses/resp_known"),
        ("GET", "/v1/responses/resp_known/input_items"),
        ("DELETE", "/v1/responses/resp_known"),
        ("POST", "/v1/responses/resp_known/cancel"),
    ):
        assert site.http.request(method, path, headers=BOB).status_code == 404, path
    later = {"model": "tiny", "input": "b", "previous_response_id": "resp_known"}
    assert site.http.post("/v1/responses", json=later, headers=BOB).status_code == 404
    assert site.http.post("/v1/responses", json=later, headers=ALICE).status_code == 200
    # The name is free for others: that it is taken tells nothing.
    assert site.http.post("/v1/responses", json=body, headers=BOB).status_code == 200


def test_a_request_is_ended_by_the_key_that_made_it_or_by_an_administrator(site: Site) -> None:
    site.generator.hold_after = 1
    body = {"text": "a", "stream": True, "rid": "job"}
    with site.http.stream("POST", "/generate", json=body, headers=ALICE) as open_:
        lines = open_.iter_lines()
        next(lines)
        with httpx.Client(base_url=site.url, timeout=60) as other:

            def abort(by: dict[str, str], **what: object) -> int:
                return other.post("/abort_request", json=what, headers=by).json()["aborted"]

            assert abort(BOB, rid="job") == 0 and abort(BOB, abort_all=True) == 0
            assert abort(ALICE, rid="job") == 1 and abort(ALICE, abort_all=True) == 1
            assert abort(ADMIN, rid="job") == 1 and abort(ADMIN, abort_all=True) == 1
    assert site.client.aborted == ["job"] * 4


def test_requests_of_several_keys_on_one_connection_are_answered_in_order() -> None:
    """All of them in one packet, as a proxy sends them, among them one with a wrong key."""
    keys = ("alice", "bob", "nobody")
    with Site(config_of("--api-key", "alice bob").server).serving() as site:
        site.generator.script = lambda r: steps(site.tokenizer.decode(r.prompt)[-3:])

        def written(number: int) -> bytes:
            body = f'{{"text": "canary {number:03}"}}'
            head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
            return f"{head}\r\nAuthorization: Bearer {keys[number % 3]}\r\n\r\n{body}".encode()

        last = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", site.port), timeout=60) as connection:
            connection.sendall(b"".join(map(written, range(30))) + last)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        namespaces = [request.message.namespace for request in site.generator.asked]
    found = re.findall(r"HTTP/1.1 (\d+)|\"text\": ?\"(\d+)\"", answer)
    wanted: list[tuple[str, str]] = []
    for n in range(30):
        wanted += [("401", "")] if n % 3 == 2 else [("200", ""), ("", f"{n:03}")]
    assert found == [*wanted, ("200", "")]
    assert len(namespaces) == 20 and set(namespaces[::2]).isdisjoint(namespaces[1::2])
