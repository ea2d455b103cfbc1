"""Clients that connect and do not behave: others are served, and nothing is left of them."""

import json
import socket
import struct
import subprocess
import sys

import httpx

from tests.support.crowd import Crowd
from tests.system.conftest import StartServer
from tests.system.serving import (
    CALL_S,
    ROOT,
    Server,
    open_files,
    settled,
    stream_events,
    wait_until,
)

HALF = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
WAITING = 300
RESETS = 1000
UNREAD = 40
IDS = {"input_ids": [5, 6, 7]}


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=CALL_S)


def files_of(server: Server) -> int:
    """How many it has open, the connection of the test's own client among them."""
    server.http.get("/health")
    return open_files(server.pid)


def test_half_requests_hold_up_nobody(shared_server):
    before = files_of(shared_server)
    held = [connect(shared_server) for _ in range(WAITING)]
    for client in held:
        client.sendall(HALF)
    answer = shared_server.generate(**IDS, sampling_params={"max_new_tokens": 4})
    assert answer["meta_info"]["completion_tokens"] >= 1
    for client in held:
        client.close()
    wait_until(lambda: open_files(shared_server.pid) <= before, CALL_S, "the connections to go")


def test_polls_on_kept_connections_are_answered_while_others_come_and_go():
    """A few of them; `make test-faults` sends 200,000."""
    command = [sys.executable, "-m", "tests.support.livez_hunt", "--polls", "4000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CALL_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_overload_by_one_caller_leaves_the_others_their_shares(server: StartServer):
    """Ten times what may wait comes, most of it with one key: a refused one reads why and when
    to come again, nobody is lost, and few clients are served as often as many."""
    keys = {"eager-key": 24, "modest-key": 4, "shy-key": 1}
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}

    def body_of(number: int, count: int) -> dict:
        return {"input_ids": [5, 6 + number], "sampling_params": params}

    flags = ("--max-running-requests", "2", "--max-queued-requests", "6")
    with server("--api-key", " ".join(keys), *flags) as running:
        eager, modest, shy = (Crowd(running, n, body_of, key) for key, n in keys.items())
        modest.wait_for(60)
        for crowd in (eager, modest, shy):
            crowd.end()
        running.http.headers["authorization"] = "Bearer shy-key"
        stats = settled(running.stats, 0)
        assert stats["leaked"] == 0 == stats["held_pages"]
    refusals = eager.refusals + modest.refusals + shy.refusals
    assert len(refusals) > 60
    for refusal in refusals:
        assert refusal.status_code in (429, 503), refusal.text
        assert int(refusal.headers["retry-after"]) >= 1
        assert refusal.json()["message"] or refusal.json()["error"]["message"]
    assert eager.good < 3 * modest.good and eager.good < 12 * shy.good
    assert len({tuple(a["output_ids"]) for b, s, a in shy.answers if s == 200}) == 1


def test_connections_that_are_reset_leave_nothing(shared_server):
    before = files_of(shared_server)
    for _ in range(RESETS):
        client = connect(shared_server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert shared_server.http.get("/health").status_code == 200
    wait_until(lambda: open_files(shared_server.pid) <= before, CALL_S, "the connections to go")


def test_a_request_id_in_a_header_is_never_the_server_s_own(shared_server):
    params = {"max_new_tokens": 200, "ignore_eos": True}
    body = IDS | {"sampling_params": params, "stream": True}
    for given in ("one", "../../etc/passwd", "tcp://evil:1", "x" * 5000):
        headers = {"x-request-id": given}
        with httpx.stream(
            "POST", shared_server.url + "/generate", json=body, headers=headers, timeout=CALL_S
        ) as first:
            events = stream_events(first)
            next(events)
            short = IDS | {"sampling_params": {"max_new_tokens": 1}}
            second = shared_server.http.post("/generate", json=short, headers=headers)
            assert second.status_code == 200, second.text
            ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
            assert len(ids) == 2 and given not in ids
            *_, last = events
        assert last["meta_info"]["completion_tokens"] == 200


def test_streams_that_nobody_reads_hold_up_nobody_and_end_with_their_clients(shared_server):
    params = {"max_new_tokens": 600, "ignore_eos": True}
    body = json.dumps(IDS | {"sampling_params": params, "stream": True, "return_logprob": True})
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    before = files_of(shared_server)
    deaf = []
    for _ in range(UNREAD):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", shared_server.port))
        client.sendall((head + body).encode())
        deaf.append(client)
    wait_until(lambda: shared_server.stats()["running"] > 1, CALL_S, "the streams to run")
    answer = shared_server.generate(**IDS, sampling_params={"max_new_tokens": 4})
    assert answer["meta_info"]["completion_tokens"] >= 1
    for client in deaf:
        client.close()
    wait_until(lambda: shared_server.stats()["held_pages"] == 0, CALL_S, "the pages to come back")
    wait_until(lambda: open_files(shared_server.pid) <= before, CALL_S, "the connections to go")
