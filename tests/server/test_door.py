"""Who is let in and what is read: keys, hosts, bodies, JSON, headers, vanishing clients."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.server.http import auth, listen
from banyan.server.http.app import BODIES_IN_MEMORY
from banyan.server.http.auth import Guard, Keys
from banyan.server.http.limits import ReceivedBody, read_body, strict_json
from banyan.server.routes import all_routes
from tests.server.fakes import Site, steps
from tests.support.cases import check_each
from tests.support.flags import config_of
from tests.system.serving import wait_until

KEY, ADMIN = "sesame-key", "sesame-admin"
OPEN_PATHS = {
    "/metrics",
    "/livez",
    "/readyz",
    "/ready",
    "/health",
    "/health_generate",
    "/favicon.ico",
    "/console/",
}
ADMIN_SAMPLE = {"/flush_cache", "/load_lora_adapter", "/configure_logging"}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def locked() -> Iterator[Site]:
    flags = ("--api-key", KEY, "--admin-api-key", ADMIN, "--max-body-bytes", "4096")
    with Site(config_of(*flags).server).serving() as s:
        yield s


def ask(site: Site, path: str, key: str = "", method: str = "GET") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return site.http.request(method, path, headers=headers)


def test_every_route_but_health_needs_a_key(locked: Site) -> None:
    def check(route: object) -> None:
        status = ask(locked, route.path, method=route.methods[0]).status_code
        assert (status != 401) == (route.path in OPEN_PATHS)

    check_each(all_routes(), check, lambda r: r.path)


def test_each_route_takes_only_its_own_key(locked: Site) -> None:
    def check(route: object) -> None:
        method = route.methods[0]
        wanted, other = (ADMIN, KEY) if route.guard == auth.ADMIN else (KEY, ADMIN)
        assert ask(locked, route.path, wanted, method).status_code != 401
        if route.guard == auth.OWN:
            assert ask(locked, route.path, other, method).status_code != 401
        elif route.path not in OPEN_PATHS:
            assert ask(locked, route.path, other, method).status_code == 401

    check_each(all_routes(), check, lambda r: r.path)


def test_the_admin_routes_are_admin_routes() -> None:
    guarded = {r.path for r in all_routes() if r.guard == auth.ADMIN}
    assert guarded >= ADMIN_SAMPLE


def test_a_refused_key_has_the_body_that_clients_know(locked: Site) -> None:
    answer = ask(locked, "/v1/models", "wrong")
    assert answer.status_code == 401 and answer.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1/%6dodels", "/v1/models/", "/health/../v1/models", "/healthz",
     "/metrics/../v1/models", "/nothing"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_odd_paths_do_not_pass_the_guard(locked: Site, path: str, method: str) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as raw:
        raw.sendall(f"{method} {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        assert raw.recv(4096).split()[1] == b"401"


def test_a_websocket_upgrade_needs_the_key_too(locked: Site) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    assert httpx.get(f"{locked.url}/v1/realtime", headers=headers).status_code == 401


def test_options_tells_methods_without_a_key(locked: Site) -> None:
    answer = httpx.options(f"{locked.url}/generate")
    assert answer.status_code == 204 and "POST" in answer.headers["allow"]
    assert "access-control-allow-origin" not in answer.headers


def test_no_answer_holds_a_key(locked: Site) -> None:
    for route in all_routes():
        for key in (KEY, ADMIN):
            text = ask(locked, route.path, key, route.methods[0]).text
            assert KEY not in text and ADMIN not in text, route.path


def test_admin_routes_need_a_key_from_afar() -> None:
    guard = Guard(Keys(""), "", "0.0.0.0")
    assert guard.judge(auth.ADMIN, b"", "10.0.0.9", "10.0.0.1:30000").status == 403
    assert guard.judge(auth.ADMIN, b"", "10.0.0.9", "localhost").status == 403
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "localhost:30000").status == 200
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "[::1]:30000").status == 200
    assert guard.judge(auth.KEY, b"", "10.0.0.9", "10.0.0.1").status == 200


def test_a_page_s_own_name_for_this_machine_opens_no_admin_route() -> None:
    guard = Guard(Keys(""), "", "0.0.0.0")
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "evil.example:30000").status == 403
    assert guard.judge(auth.KEY, b"", "127.0.0.1", "evil.example:30000").status == 200


def test_the_only_key_is_the_admin_key_too() -> None:
    guard = Guard(Keys(KEY), "", "0.0.0.0")
    assert guard.judge(auth.ADMIN, b"Bearer sesame-key", "10.0.0.9", "h").status == 200
    assert guard.judge(auth.ADMIN, b"Bearer wrong", "127.0.0.1", "h").status == 401


def test_with_several_keys_each_opens_the_api_and_none_the_admin_routes() -> None:
    guard = Guard(Keys("alice-key bob-key"), "", "0.0.0.0")
    tenants = set()
    for name in (b"alice", b"bob"):
        verdict = guard.judge(auth.KEY, b"Bearer " + name + b"-key", "10.0.0.9", "h")
        assert verdict.status == 200 and not verdict.is_admin
        tenants.add(verdict.caller.tenant)
        refused = guard.judge(auth.ADMIN, b"Bearer " + name + b"-key", "127.0.0.1", "localhost")
        assert refused.status == 403 and "--admin-api-key" in refused.text
    assert len(tenants) == 2
    assert guard.judge(auth.KEY, b"Bearer alice-key bob-key", "10.0.0.9", "h").status == 401


def test_an_admin_key_rules_over_what_every_key_has_made() -> None:
    guard = Guard(Keys("alice-key bob-key"), ADMIN, "0.0.0.0")
    assert guard.judge(auth.OWN, b"Bearer sesame-admin", "10.0.0.9", "h").is_admin
    assert not guard.judge(auth.OWN, b"Bearer alice-key", "10.0.0.9", "h").is_admin
    assert guard.judge(auth.OWN, b"Bearer carol-key", "10.0.0.9", "h").status == 401
    assert guard.judge(auth.KEY, b"Bearer sesame-admin", "10.0.0.9", "h").status == 401


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:30000", "[::1]:1", "LocalHost:5"])
def test_a_local_server_answers_to_local_names(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_rebound_name_is_421_and_a_foreign_page_403(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
    foreign = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    local = http.get("/v1/models", headers={"origin": "http://localhost:3000"})
    assert local.status_code == 200


def test_a_server_for_the_network_answers_to_any_name() -> None:
    for key in ("", KEY):
        guard = Guard(Keys(key), "", "0.0.0.0")
        guard.check_origin("models.example", "", "")
        guard.check_origin("models.example:30000", "https://models.example", "same-origin")
    guard.check_origin("models.example", "https://app.example", "cross-site")  # it has a key


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("origin", "site"),
    [("https://evil.example", "cross-site"), ("https://evil.example", ""), ("null", "cross-site"),
     ("", "cross-site"), ("", "same-site")],
)  # fmt: skip
def test_without_a_key_no_page_of_others_calls_a_server(host: str, origin: str, site: str) -> None:
    with pytest.raises(RequestError) as caught:
        Guard(Keys(""), "", host).check_origin("127.0.0.1:30000", origin, site)
    assert caught.value.status == 403


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    "path", ["/flush_cache", "/configure_logging?log_level=critical", "/close_session"]
)
def test_an_image_in_a_page_changes_nothing(
    site: Site, http: httpx.Client, path: str, method: str
) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert http.request(method, path, headers=headers).status_code == 403
    assert site.client.calls == []
    assert http.get("/v1/models", headers={"sec-fetch-site": "none"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e400}',
     b'{"a":"\\ud800"}', b'{"a":"\x00"}', b'{"a":"\xff"}', b"", b"nope", b'{"a":1}x',
     b'{"a":' + b"9" * 5000 + b"}"],
    ids=lambda b: repr(b[:24]),
)  # fmt: skip
def test_json_that_readers_disagree_on_is_refused(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/generate", "/tokenize"):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["code"] == "invalid_json"


def test_large_integers_stay_exact() -> None:
    assert strict_json(b'{"a": 123456789012345678901}') == {"a": 123456789012345678901}


def test_a_duplicate_key_is_named() -> None:
    with pytest.raises(RequestError, match="'x' appears twice"):
        strict_json(b'{"a": [{"x": 1, "x": 2}]}')


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"3", b"null"])
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    assert http.post("/generate", content=body).status_code == 400


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    answer = http.post("/generate", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert answer.status_code == 400


def headed(site: Site, head: bytes, body: bytes = b"") -> bytes:
    """The status of a raw request."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as raw:
        raw.sendall(head + b"\r\n" + body)
        return raw.recv(4096).split()[1]


AUTH = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
POST = b"POST /generate HTTP/1.1\r\n" + AUTH


def test_a_body_above_the_limit_is_413_however_it_comes(locked: Site) -> None:
    assert headed(locked, POST + b"Content-Length: 5000\r\n") == b"413"
    assert headed(locked, POST + b"Content-Length: 99999999999999999999999\r\n") in (b"413", b"400")
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    assert headed(locked, POST + b"Transfer-Encoding: chunked\r\n", chunk * 2) == b"413"


ENDING = POST + b"Connection: close\r\n"
BIG = b" " * (8 << 20)


def sent_whole(site: Site, head: bytes, body: bytes) -> list[bytes]:
    """Everything that comes back to a client that reads only when it has sent its whole request."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as raw:
        raw.sendall(head + b"\r\n" + body)
        return list(iter(lambda: raw.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (ENDING + b"Content-Length: %d\r\n" % len(BIG), BIG, b"413"),
        (
            ENDING + b"Transfer-Encoding: chunked\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(BIG), BIG),
            b"413",
        ),
        (ENDING + b"Transfer-Encoding: chunked\r\n", b"none\r\n" + BIG, b"400"),
        (ENDING.replace(KEY.encode(), b"?") + b"Content-Length: %d\r\n" % len(BIG), BIG, b"401"),
        (
            ENDING.replace(b"/generate", b"/nowhere") + b"Content-Length: %d\r\n" % len(BIG),
            BIG,
            b"404",
        ),
        (POST + b"x: ", b"y" * len(BIG), b"431"),
    ],
    ids=["length", "chunked", "malformed", "no key", "no route", "header"],
)
def test_a_client_that_sends_everything_first_reads_why_it_is_refused(
    locked: Site, head: bytes, body: bytes, status: bytes
) -> None:
    assert b"".join(sent_whole(locked, head, body)).split()[1] == status


def test_a_connection_goes_on_behind_a_body_that_was_refused(locked: Site) -> None:
    too_large = POST + b"Content-Length: %d\r\n" % len(BIG)
    next_one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    found = b"".join(sent_whole(locked, too_large, BIG + next_one))
    assert found.count(b"HTTP/1.1 ") == 2 and found.split()[1] == b"413"
    assert found.split(b"HTTP/1.1 ")[2].startswith(b"200")


@pytest.mark.parametrize("size", [1 << 20, 1000, 7])
def test_requests_that_do_not_wait_for_answers_are_answered_in_order(site: Site, size: int) -> None:
    """Forty in one packet, or cut anywhere; later ones wait for the end of a stream."""
    site.generator.script = lambda request: steps(f"<{len(request.prompt)}>")
    kinds = [
        (b"GET /livez", b"", b"200"),
        (b"GET /nowhere", b"", b"404"),
        (b"POST /generate", b'{"text": "abc"}', b"<3>"),
        (b"POST /generate", b'{"text": "abcdefgh", "stream": true}', b"<8>"),
        (b"POST /generate", b"{", b"400"),
    ]
    wanted, said = [], b""
    for number in range(40):
        line, body, sign = kinds[number * 7 % len(kinds)]
        last = b"Connection: close\r\n" if number == 39 else b""
        head = line + b" HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: n%d\r\n" % number
        said += head + last + b"Content-Length: %d\r\n\r\n" % len(body) + body
        wanted.append((b"n%d" % number, sign))
    found = b""
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as client:
        sender = threading.Thread(target=_sent_in_pieces, args=(client, said, size))
        sender.start()
        while part := client.recv(1 << 16):
            found += part
        sender.join()
    answers = found.split(b"HTTP/1.1 ")[1:]
    assert len(answers) == len(wanted)
    for answer, (name, sign) in zip(answers, wanted, strict=True):
        assert b"x-client-request-id: " + name + b"\r\n" in answer and sign in answer


def _sent_in_pieces(client: socket.socket, said: bytes, size: int) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(said), size):
        client.sendall(said[at : at + size])


def test_nothing_behind_the_last_request_of_a_connection_is_answered(locked: Site) -> None:
    head = ENDING + b"Content-Length: %d\r\n" % len(BIG)
    found = b"".join(
        sent_whole(locked, head, BIG + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    )
    assert found.count(b"HTTP/1.1 ") == 1 and found.split()[1] == b"413"


@pytest.mark.parametrize("head", [POST, ENDING], ids=["kept", "ending"])
@pytest.mark.parametrize("bound", [{"MAX_DRAINED_BYTES": 1 << 20}, {"DRAIN_S": 0.05}], ids=str)
def test_a_body_is_dropped_within_bounds(
    locked: Site, monkeypatch: pytest.MonkeyPatch, head: bytes, bound: dict[str, float]
) -> None:
    for name, value in bound.items():
        monkeypatch.setattr(listen, name, value)
    start = head + b"Content-Length: %d\r\n\r\n" % (1 << 40)
    assert closed_after(locked, start, BIG, 1 << 40)


def test_a_client_that_stops_sending_its_refused_body_is_not_waited_for(
    locked: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "DRAIN_S", 0.05)
    for head in (POST, ENDING):
        found = b"".join(sent_whole(locked, head + b"Content-Length: 9999\r\n", b" "))
        assert found.split()[1] == b"413"


def test_bodies_that_come_at_the_same_time_share_a_room() -> None:
    most = 4096
    part = b" " * (most - 96)
    server = config_of("--max-body-bytes", str(most)).server
    with Site(server).serving() as site, ExitStack() as stack:
        slow = []
        for _ in range(BODIES_IN_MEMORY):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", site.port), 10))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % most + part)
            slow.append(raw)

        def asked(size: int) -> httpx.Response:
            return httpx.post(site.url + "/generate", content=b" " * size)

        wait_until(lambda: asked(most).status_code == 503, 60, "the room to be full")
        refused = asked(most)
        assert "room for 32768" in refused.text and refused.headers["retry-after"]
        assert asked(100).status_code == 400, "what is small has room"
        chunked = b"1000\r\n" + b" " * 4096 + b"\r\n"
        assert headed(site, POST + b"Transfer-Encoding: chunked\r\n", chunked) == b"503"
        slow[0].close()
        wait_until(lambda: asked(most).status_code == 400, 60, "room for one more")
        for raw in slow[1:]:
            raw.sendall(b" " * 96)
            assert raw.recv(4096).split()[1] == b"400"
        for _ in range(2 * BODIES_IN_MEMORY):
            assert asked(most).status_code == 400, "what was refused holds nothing"


def test_a_stream_holds_no_room_for_its_body(site: Site) -> None:
    site.generator.hold_after = 1
    body = {"text": "x" * 1000, "stream": True}
    with httpx.stream("POST", site.url + "/generate", json=body) as answer:
        lines = answer.iter_lines()  # one that is let go closes the stream
        next(lines)
        (context,) = (e for e in site.app.open_requests if not e.is_probe)
        assert not context.request.body


def test_a_body_that_stalls_is_408() -> None:
    async def stall() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(stall, None, 100, ReceivedBody(FairShare(100)), timeout_s=0.01))
    assert caught.value.status == 408


def test_headers_beyond_the_bounds_are_431(locked: Site) -> None:
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(10_000))
    assert headed(locked, b"GET /livez HTTP/1.1\r\n" + many) == b"431"
    assert headed(locked, b"GET /livez HTTP/1.1\r\nx: " + b"y" * (1 << 17) + b"\r\n") == b"431"


def closed_after(site: Site, start: bytes, more: bytes, most: int) -> bool:
    """Whether the server hangs up on a client that goes on sending, before it has sent `most`."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as raw:
        raw.sendall(start)
        sent = 0
        try:
            while sent < most:
                raw.sendall(more)
                sent += len(more)
            raw.settimeout(1)
            while raw.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: " + b"y" * 8000 + b"\r\n"),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"y" * 8000),
        (CHUNKED + b"2;x=", b"y" * 8000),
        (POST + b"x: ", b"y" * 8000),
    ],
    ids=["trailers", "one trailer", "a chunk's extension", "one header"],
)
def test_what_is_no_body_is_bounded_wherever_it_comes(
    locked: Site, start: bytes, more: bytes
) -> None:
    assert closed_after(locked, start, more, 16 << 20)


def test_headers_behind_a_request_that_is_still_answered_are_bounded(site: Site) -> None:
    site.generator.hold_after = 1
    body = b'{"text": "a", "stream": true}'
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    second = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx: "
    assert closed_after(site, head + body + second, b"y" * 8000, 16 << 20)


@pytest.mark.parametrize("path", ["/livez", "/health", "/v1/models"])
def test_a_body_where_none_is_read_is_refused_unread(site: Site, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    assert headed(site, head + b"Content-Length: 1000000\r\n") == b"413"
    assert headed(site, head + b"Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n") == b"413"
    assert headed(site, head + b"Content-Length: 0\r\n") == b"200"


def test_connections_beyond_the_bound_are_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "MAX_CONNECTIONS", 0)
    address = ("127.0.0.1", site.port)
    with socket.create_connection(address, timeout=60) as raw, contextlib.suppress(ConnectionError):
        assert raw.recv(1) == b""
    monkeypatch.undo()
    assert headed(site, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n") == b"200"


def test_headers_that_never_end_are_408(locked: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
        assert raw.recv(4096).split()[1] == b"408"


def test_a_client_s_request_id_is_only_echoed_escaped(http: httpx.Client) -> None:
    given = b"tcp://evil:1\xe9\t" + b"x" * 4096
    answer = http.get("/livez", headers={b"x-request-id": given})
    assert answer.headers["x-request-id"].isalnum()
    echoed = answer.headers["x-client-request-id"]
    assert echoed.startswith("tcp://evil:1\\xe9") and len(echoed) < 300


def test_a_vanished_stream_client_ends_its_request(site: Site, http: httpx.Client) -> None:
    site.generator.hold_after = 1
    body = {"messages": USER, "stream": True, "n": 2}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert len(site.generator.open) == 2
        while site.generator.closed.acquire(blocking=False):
            pass
    assert site.generator.closed.acquire(timeout=60) and site.generator.closed.acquire(timeout=60)
    assert not site.generator.open


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_vanished_waiting_client_ends_its_request(site: Site, path: str) -> None:
    generator = site.generator
    generator.hold_after = 0
    for semaphore in (generator.started, generator.closed):
        while semaphore.acquire(blocking=False):
            pass
    body = json.dumps({"messages": USER, "prompt": "a", "text": "a"}).encode()
    if path == "/generate":
        body = b'{"text": "a"}'
    elif path == "/v1/completions":
        body = b'{"prompt": "a"}'
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = socket.create_connection(("127.0.0.1", site.port))
    raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert generator.started.acquire(timeout=60)
    raw.close()
    assert generator.closed.acquire(timeout=60)
    assert not generator.open


def test_a_client_that_never_reads_is_cut_off_and_its_request_ended() -> None:
    with Site(send_timeout_s=0.2).serving() as own:
        own.generator.script = lambda _: steps(*["x" * 1000] * 20_000)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", own.port))
        body = json.dumps({"text": "a", "stream": True}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        raw.sendall(head % len(body) + body)
        assert own.generator.closed.acquire(timeout=60)
        raw.close()


def test_reset_connections_leave_nothing(site: Site, http: httpx.Client) -> None:
    for _ in range(200):
        socket.create_connection(("127.0.0.1", site.port)).close()
    assert http.get("/livez").status_code == 200


def test_strict_servers_refuse_what_others_report() -> None:
    with Site(config_of("--strict-requests").server).serving() as strict:
        post = lambda path, body: httpx.post(strict.url + path, json=body)  # noqa: E731
        assert post("/v1/chat/completions", {"messages": USER, "user": "u"}).status_code == 400
        assert post("/v1/chat/completions", {"messages": USER, "model": "x"}).status_code == 404
        assert post("/generate", {"text": "a", "frobnicate": 1}).status_code == 400
        assert post("/v1/chat/completions", {"messages": USER}).status_code == 200


@pytest.mark.parametrize("path", [b"/generate", b"/livez"])
@pytest.mark.parametrize("length", [b"0" * 5000 + b"2", b"9" * 5000, b"0" * 5000])
def test_a_length_of_many_digits_is_read_or_refused(site: Site, path: bytes, length: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %b\r\n\r\n{}" % (path, length)
    assert headed(site, head)[:1] == b"4"
