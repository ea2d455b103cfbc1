"""Bytes that are nearly HTTP, over raw sockets: requests hidden in others, requests with damage,
and clients that send or read almost nothing.

RAW says how many damaged requests are sent (20,000).
"""

import asyncio
import json
import os
import random
import socket
import time
from collections import Counter

import pytest

from tests.system.serving import CALL_S, open_files, status_of, wait_until
from tests.system.watch import Canary, watched

NUMBER = int(os.environ.get("RAW", "20000"))
CONCURRENCY = 32
ANSWER_S = 30.0
"""Longer than any time that a server gives a client for its head or body."""
SLOW, SLOW_S = 200, 3.0
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt":"a"}'


def sized(length: int) -> bytes:
    return b"Content-Length: " + str(length).encode() + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked\r\n"
EMPTY = b"0\r\n\r\n"
SMUGGLED = {
    "length and chunks": HEAD + sized(len(EMPTY)) + CHUNKED + b"\r\n" + EMPTY + HIDDEN,
    "chunks and length": HEAD + CHUNKED + sized(len(EMPTY + HIDDEN)) + b"\r\n" + EMPTY + HIDDEN,
    "two lengths": HEAD + sized(0) + sized(len(HIDDEN)) + b"\r\n" + HIDDEN,
    "a list of lengths": HEAD + b"Content-Length: 0, 45\r\n\r\n" + HIDDEN,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "a length with a sign": HEAD + b"Content-Length: +0\r\n\r\n" + HIDDEN,
    "a length in hex": HEAD + b"Content-Length: 0x2\r\n\r\n{}" + HIDDEN,
    "a length that overflows": HEAD + sized(2**64) + b"\r\n" + HIDDEN,
    "a blank before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + EMPTY + HIDDEN,
    "chunked twice": HEAD + CHUNKED + CHUNKED + sized(4) + b"\r\n" + EMPTY + HIDDEN,
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n" + sized(0) + b"\r\n" + HIDDEN,
    "identity behind chunked": HEAD
    + b"Transfer-Encoding: chunked, identity\r\n"
    + sized(0)
    + b"\r\n"
    + HIDDEN,
    "a folded header": HEAD
    + b"X: a\r\n Transfer-Encoding: chunked\r\n"
    + sized(4)
    + b"\r\n"
    + EMPTY,
    "a bare line feed in a header": HEAD
    + b"X: a\nTransfer-Encoding: chunked\r\n\r\n"
    + EMPTY
    + HIDDEN,
    "a bare carriage return": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + EMPTY + HIDDEN,
    "a null in a header": HEAD + b"X: a\0b\r\n\r\n" + HIDDEN,
    "a chunk size that overflows": HEAD + CHUNKED + b"\r\nfffffffffffffffff\r\n" + HIDDEN,
    "a chunk size with a sign": HEAD + CHUNKED + b"\r\n-1\r\n" + HIDDEN,
    "a chunk that is longer than announced": HEAD + CHUNKED + b"\r\n1\r\n{}\r\n" + EMPTY + HIDDEN,
    "a request in the target": b"GET /livez HTTP/1.1\r\n" + HIDDEN,
    "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
}
"""Name -> bytes in which a careless reader sees another request than a careful one."""


def answers(port: int, raw: bytes) -> list[int]:
    """Status of each answer until the server has no more to say."""
    with socket.create_connection(("127.0.0.1", port), timeout=CALL_S) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        got = b""
        while part := client.recv(65536):
            got += part
    return [int(line[9:12]) for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.")]


def test_no_request_is_hidden_in_another(server):
    wrong = {}
    with server() as running:
        canary = Canary(running)
        for name, raw in SMUGGLED.items():
            got = answers(running.port, raw)
            if len(got) > 1 or any(status < 400 or status >= 500 for status in got):
                wrong[name] = got
        canary.end()
    print(f"\nfigure: {len(SMUGGLED)} forms of smuggled requests, {len(wrong)} not refused whole")
    assert not wrong, wrong


def damaged(dice: random.Random) -> bytes:
    """A request of which some bytes are others, gone, or there twice."""
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
    out = bytearray(
        dice.choice(
            (
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
                + sized(len(body))
                + b"\r\n"
                + body,
                HEAD + CHUNKED + b"\r\n" + b"e\r\n" + BODY + b"\r\n" + EMPTY,
                b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
                b"OPTIONS * HTTP/1.0\r\n\r\n",
                dice.randbytes(dice.randint(1, 300)),
            )
        )
    )
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(4):
            case 0:
                out[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del out[at : at + dice.randint(1, 12)]
            case 2:
                out[at:at] = out[at : at + dice.randint(1, 60)]
            case 3:
                out[at:at] = dice.choice((b"\r\n", b"\n", b"\0", b": ", b"HTTP/9.9", b"\xff\xfe"))
    return bytes(out)


async def hurl(port: int, seen: Counter[str]) -> None:
    dice = random.Random(11)
    requests = iter([damaged(dice) for _ in range(NUMBER)])

    async def send() -> None:
        for raw in requests:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(raw)
                writer.write_eof()
                got = await asyncio.wait_for(reader.read(), ANSWER_S)
                seen[got[9:12].decode("latin-1") if got else "closed"] += 1
            except TimeoutError:
                seen["hangs"] += 1
            except ConnectionError:
                seen["closed"] += 1
            finally:
                writer.close()

    await asyncio.gather(*(send() for _ in range(CONCURRENCY)))


def test_damaged_requests_are_refused_and_others_notice_nothing(server):
    seen: Counter[str] = Counter()
    with server("--log-level", "error") as running:
        canary = Canary(running)
        before = open_files(running.pid)
        with watched(running) as watch:
            asyncio.run(hurl(running.port, seen))
        canary.end()
        assert status_of(running, "/health") == 200
        wait_until(lambda: open_files(running.pid) <= before + 4, CALL_S, "the connections to go")
        log = running.log.read_text()
    reported = ", ".join(f"{count:,} × {what}" for what, count in sorted(seen.items()))
    print(
        f"\nfigure: {NUMBER:,} damaged requests: {reported}; /livez blocked for "
        f"{watch.blocked_s * 1000:.0f} ms at most, {watch.grown_mb:+.0f} MB"
    )
    assert "Traceback" not in log, log[-2000:]
    assert not [what for what in seen if what.startswith("5") or what == "hangs"], seen
    assert watch.grown_mb < 20


@pytest.mark.parametrize("kind", ["slow heads", "slow bodies", "deaf streams"])
def test_clients_that_hardly_move_hold_up_nobody(server, kind):
    wanted = json.dumps(
        {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 900}}
    ).encode()
    post = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
    full = post + sized(len(wanted)) + b"\r\n" + wanted
    raw = {"slow heads": full, "slow bodies": full, "deaf streams": full}[kind]
    with server("--max-running-requests", "16") as running:
        canary = Canary(running)
        before = open_files(running.pid)
        clients = []
        for _ in range(SLOW):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.port))
            cut = {"slow heads": 20, "slow bodies": len(raw) - 10, "deaf streams": len(raw)}[kind]
            client.sendall(raw[:cut])
            clients.append(client)
        with watched(running) as watch:
            until = time.monotonic() + SLOW_S
            at = 0
            while time.monotonic() < until:
                if kind != "deaf streams" and at < 9:
                    for client in clients:
                        client.sendall(raw[cut + at : cut + at + 1])
                at += 1
                time.sleep(SLOW_S / 10)  # the slowness is what is tested
        canary.end()
        for client in clients:
            client.close()
        wait_until(lambda: open_files(running.pid) <= before + 4, CALL_S, "the connections to go")
        wait_until(lambda: running.stats()["held_pages"] == 0, CALL_S, "the pages to come back")
    print(
        f"\nfigure: {SLOW} {kind}: {len(canary.songs)} right answers to others, /livez blocked "
        f"for {watch.blocked_s * 1000:.0f} ms at most, {watch.peak_mb:+.0f} MB at most"
    )
    assert watch.blocked_s < 0.5 and watch.peak_mb < 100
