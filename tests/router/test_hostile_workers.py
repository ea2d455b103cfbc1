"""Workers that break HTTP, over sockets. Of 20 clients at once each must get its own answer or an
error, and the requests behind them must get their own answers.
"""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import httpx
import orjson
import pytest

import banyan.router.upstream as upstreams
from banyan.router.config import HealthConfig, PolicyConfig
from banyan.router.upstream import Upstream, WorkerLost
from tests.router.fakes import (
    BASE,
    STREAM_HEAD,
    Request,
    Routed,
    chunk,
    router,
    says,
    specs,
    turns,
    until,
    whole,
    workers,
)

pytestmark = pytest.mark.asyncio

CLIENTS = 20
CONFIG = replace(BASE, policy=PolicyConfig(name="round_robin"), health=HealthConfig(is_off=True))
CANARY = re.compile(r"canary-[a-z]+-\d+-")

OK = b"HTTP/1.1 200 OK\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"

OWN, ERROR, EITHER = "its own answer", "an error", "its own answer or an error"

Attack = Callable[[bytes, asyncio.StreamWriter, int], Awaitable[None]]
"""Called with the body that is the right answer, the connection, and the number of the request."""


@dataclass
class Hostile:
    """A worker that attacks while it is asked for `/generate` with `attacked`, and is honest with
    all others."""

    attack: Attack
    ended: int = 0
    numbers: itertools.count = field(default_factory=itertools.count)

    async def say(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        good = orjson.dumps({"echo": request.fields["canary"]})
        if request.fields["canary"].startswith("canary-honest"):
            writer.write(whole(good))
            return
        try:
            await self.attack(good, writer, next(self.numbers))
        finally:
            self.ended += 1


@dataclass
class Got:
    """What a client got; status 0 = its connection was cut."""

    status: int
    body: bytes


async def ask(it: Routed, canary: str) -> Got:
    try:
        answer = await it.http.post("/generate", json={"canary": canary})
        return Got(answer.status_code, answer.content)
    except httpx.TransportError:
        return Got(0, b"")


async def play(it: Routed, expected: str, hostile: Hostile, count: int = CLIENTS) -> list[Got]:
    """20 clients of a hostile worker, then of an honest one."""
    names = [f"canary-attacked-{at}-" for at in range(count)]
    got = await asyncio.gather(*(ask(it, name) for name in names))
    for name, answer in zip(names, got, strict=True):
        check(answer, name, expected)
    # What a worker writes behind its answers must have come before the next request is sent.
    # Nobody could tell it from an answer to that otherwise.
    await until(lambda: hostile.ended >= count)
    await turns()
    for at in range(count):
        name = f"canary-honest-{at}-"
        check(await ask(it, name), name, OWN)
    return got


def check(got: Got, name: str, expected: str) -> None:
    text = got.body.decode("latin-1")
    assert set(CANARY.findall(text)) <= {name}, f"{name} was answered {text!r}"
    if got.status == 200 and expected != ERROR:
        assert orjson.loads(got.body) == {"echo": name}
        return
    assert expected != OWN and got.status in (0, 503), (got, expected)
    if got.status:
        assert orjson.loads(got.body)["error"]["code"] == "worker_lost"


def writes(make: Callable[[bytes], bytes], closes: bool = False) -> Attack:
    """An attack in one packet."""

    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(make(good))
        if closes:
            writer.close()

    return attack


def in_turns(make: Callable[[bytes], list[bytes]]) -> Attack:
    """An attack in several packets, each of which arrives before the next one is sent."""

    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        for part in make(good):
            writer.write(part)
            await turns()

    return attack


def split(make: Callable[[bytes], bytes]) -> Attack:
    """The same answer to each, cut at another byte each time."""

    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        raw = make(good)
        at = number % len(raw)
        writer.write(raw[:at])
        await turns()
        writer.write(raw[at:])

    return attack


def endless(begins: bytes, goes_on: bytes) -> Attack:
    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(begins)
        while not writer.is_closing():
            writer.write(goes_on)
            await writer.drain()
            await asyncio.sleep(0)

    return attack


def cut(make: Callable[[bytes], bytes], is_abort: bool) -> Attack:
    """An answer whose connection ends at another byte each time."""

    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        raw = make(good)
        writer.write(raw[: number % len(raw)])
        await turns()
        writer.transport.abort() if is_abort else writer.close()

    return attack


def chunked(good: bytes, behind: bytes = b"") -> bytes:
    parts = b"".join(chunk(good[at : at + 7]) for at in range(0, len(good), 7))
    return OK + b"transfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n" + behind + b"\r\n"


STALE = whole(b'{"echo": "canary-stale-0-"}')
"""An answer that nobody asked for."""
_CHUNKS = OK + b"transfer-encoding: chunked\r\n\r\n"


def interim(status: int) -> bytes:
    return b"HTTP/1.1 %d X\r\n\r\n" % status


INTERIM = {
    **{
        f"{status}, then the answer": (in_turns(lambda g, s=status: [interim(s), whole(g)]), OWN)
        for status in (100, 102, 103, 199)
    },
    **{
        f"{status} glued to the answer": (writes(lambda g, s=status: interim(s) + whole(g)), OWN)
        for status in (100, 102, 103, 199)
    },
    "103 three times": (in_turns(lambda g: [HINTS, HINTS, HINTS, whole(g)]), OWN),
    "all of them, glued": (writes(lambda g: CONTINUE + PROCESSING + HINTS + chunked(g)), OWN),
    "all of them, cut anywhere": (split(lambda g: CONTINUE + PROCESSING + HINTS + whole(g)), OWN),
    "103 with a length": (
        in_turns(lambda g: [b"HTTP/1.1 103 X\r\ncontent-length: 5\r\n\r\n", whole(g)]),
        OWN,
    ),
    "103, then the end": (writes(lambda g: HINTS, closes=True), ERROR),
    "101": (writes(lambda g: interim(101)), ERROR),
    "101 before the answer": (in_turns(lambda g: [interim(101), whole(g)]), ERROR),
    "101 glued to the answer": (writes(lambda g: interim(101) + whole(g)), ERROR),
    "103 in a body of chunks": (
        in_turns(lambda g: [_CHUNKS + chunk(g[:5]), HINTS, chunk(g[5:]) + b"0\r\n\r\n"]),
        ERROR,
    ),
    "103 without end": (endless(b"", HINTS), ERROR),
    "100 without end": (endless(b"", CONTINUE * 1000), ERROR),
}
BEHIND = {
    "two answers in one packet": (writes(lambda g: whole(g) + STALE), OWN),
    "two answers in chunks": (writes(lambda g: chunked(g) + STALE), OWN),
    "two answers cut anywhere": (split(lambda g: whole(g) + STALE), OWN),
    "a second answer later": (in_turns(lambda g: [whole(g), STALE]), OWN),
    "half a second answer, and the rest later": (
        in_turns(lambda g: [whole(g) + STALE[:20], STALE[20:]]),
        OWN,
    ),
    "an interim answer behind": (in_turns(lambda g: [whole(g) + HINTS, STALE]), OWN),
    "one byte behind, then an answer": (in_turns(lambda g: [whole(g) + b"x", STALE]), OWN),
    "an empty line behind, then an answer": (in_turns(lambda g: [whole(g) + b"\r\n", STALE]), OWN),
    "a body that 204 may not have": (
        in_turns(lambda g: [whole(g) + b"HTTP/1.1 204 X\r\ncontent-length: 9\r\n\r\n", STALE]),
        OWN,
    ),
}
BODIES = {
    "in chunks": (writes(chunked), OWN),
    "in chunks, cut anywhere": (split(chunked), OWN),
    "without a length": (writes(lambda g: OK + b"\r\n" + g, closes=True), OWN),
    "of HTTP/1.0": (
        writes(lambda g: b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(g), g)),
        OWN,
    ),
    "shorter than its length": (
        writes(lambda g: OK + b"content-length: %d\r\n\r\n%b" % (len(g) + 1, g), closes=True),
        ERROR,
    ),
    "with two lengths": (
        writes(lambda g: OK + b"content-length: %d\r\ncontent-length: 1\r\n\r\n%b" % (len(g), g)),
        ERROR,
    ),
    "with a length and in chunks": (
        writes(lambda g: OK + b"content-length: 1\r\n" + chunked(g)[len(OK) :]),
        ERROR,
    ),
    "in chunks without the last one": (writes(lambda g: chunked(g)[:-5], closes=True), ERROR),
    "with a negative chunk": (writes(lambda g: _CHUNKS + b"-5\r\n" + g), ERROR),
    "with a chunk of a huge size": (writes(lambda g: _CHUNKS + b"F" * 30 + b"\r\n" + g), ERROR),
    "with a chunk longer than its size": (writes(lambda g: _CHUNKS + b"1\r\n" + g), ERROR),
    "in an encoding that is not known": (
        writes(lambda g: OK + b"transfer-encoding: gzip\r\n\r\n" + g, closes=True),
        ERROR,
    ),
}
HEADS = {
    "a value without end": (endless(OK + b"x: ", b"y" * 65536), ERROR),
    "a name without end": (endless(OK, b"y" * 65536), ERROR),
    "headers without end": (endless(OK, b"x: y\r\n" * 1000), ERROR),
    "a folded header without end": (endless(OK + b"x: y", b"\r\n y" * 1000), ERROR),
    "a reason without end": (endless(b"HTTP/1.1 200 ", b"y" * 65536), ERROR),
    "NUL in a header": (writes(lambda g: OK + b"x: \0\r\n\r\n" + g), ERROR),
    "no HTTP": (writes(lambda g: b"hello\r\n\r\n"), ERROR),
}
TRAILERS = {
    "trailers": (writes(lambda g: chunked(g, b"checksum: 1\r\nx: y\r\n")), OWN),
    "trailers, cut anywhere": (split(lambda g: chunked(g, b"checksum: 1\r\n")), OWN),
    "trailers without end": (endless(_CHUNKS + b"0\r\n", b"x: y\r\n" * 1000), ERROR),
    "a trailer without end": (endless(_CHUNKS + b"0\r\nx: ", b"y" * 65536), ERROR),
    "a chunk's extension without end": (endless(_CHUNKS + b"5;", b"y" * 65536), ERROR),
}
CUTS = {
    "an answer with a length that is closed anywhere": (cut(whole, False), EITHER),
    "an answer with a length that is reset anywhere": (cut(whole, True), EITHER),
    "an answer in chunks that is closed anywhere": (cut(chunked, False), EITHER),
    "an answer in chunks that is reset anywhere": (cut(chunked, True), EITHER),
}
ALL = {**INTERIM, **BEHIND, **BODIES, **HEADS, **TRAILERS, **CUTS}


@pytest.mark.parametrize(("attack", "expected"), ALL.values(), ids=ALL)
async def test_everybody_gets_the_own_answer_or_an_error(attack: Attack, expected: str) -> None:
    hostile = Hostile(attack)
    async with workers(hostile.say) as some, router(specs(some), CONFIG) as it:
        rounds = 8 if attack in [case for case, _ in CUTS.values()] else 1
        for _ in range(rounds):
            await play(it, expected, hostile)


async def test_a_body_longer_than_its_length_is_cut_there_and_ends_its_connection() -> None:
    hostile = Hostile(
        in_turns(lambda g: [OK + b"content-length: %d\r\n\r\n%b}" % (len(g), g), STALE])
    )
    async with workers(hostile.say) as some, router(specs(some), CONFIG) as it:
        await play(it, OWN, hostile)
        assert some[0].connections > CLIENTS


@pytest.mark.parametrize("hundred", range(10))
async def test_every_status_is_passed_on_or_refused(hundred: int) -> None:
    async def attack(good: bytes, writer: asyncio.StreamWriter, number: int) -> None:
        status = orjson.loads(good)["echo"].split("-")[2]
        writer.write(whole(good).replace(b"200", b"%03d" % int(status), 1))
        if status.startswith("1"):
            writer.close()  # the final answer would follow

    hostile = Hostile(attack)
    async with workers(hostile.say) as some, router(specs(some), CONFIG) as it:
        every = range(100 * hundred, 100 * (hundred + 1))
        for group in (every[at : at + CLIENTS] for at in range(0, 100, CLIENTS)):
            names = [f"canary-attacked-{status:03d}-" for status in group]
            got = await asyncio.gather(*(ask(it, name) for name in names))
            for status, name, answer in zip(group, names, got, strict=True):
                if 200 <= status <= 599:
                    body = b"" if status in (204, 304) else orjson.dumps({"echo": name})
                    assert answer == Got(status, body)
                else:
                    check(answer, name, ERROR)
                    assert answer.status == 503
            check(await ask(it, "canary-honest-0-"), "canary-honest-0-", OWN)


async def test_an_early_answer_is_passed_on_and_its_connection_closed() -> None:
    async def refuses(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if request.headers["content-length"] == "2":
            assert await reader.readexactly(2) == b"{}"
            writer.write(whole(b'"good"'))
            return
        writer.write(whole(request.headers["x-canary"].encode(), 413, "text/plain"))
        await until(writer.is_closing)

    async with workers(refuses) as some, router(specs(some), CONFIG) as it:
        some[0].reads_bodies = False
        body = b"x" * (16 << 20)  # more than sockets hold
        names = [f"canary-{at}" for at in range(3)]
        asking = [
            it.http.post("/generate", content=body, headers={"x-canary": name}) for name in names
        ]
        got = await asyncio.gather(*asking)
        assert [(a.status_code, a.text) for a in got] == [(413, name) for name in names]
        before = some[0].connections
        assert (await it.http.post("/generate", json={})).content == b'"good"'
        assert some[0].connections == before + 1


async def test_a_kept_connection_is_dropped_when_anything_arrives_on_it() -> None:
    async def says_more(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(whole(b"{}"))
        await turns()
        writer.write(b"\n")

    async with workers(says_more) as some:
        upstream = Upstream(some[0].url)
        for at in range(5):
            assert await (await upstream.send("GET", b"/x", [])).whole(100) == b"{}"
            assert some[0].connections == at + 1
            some[0].left.clear()
            await some[0].left.wait()


async def test_a_connection_that_is_kept_too_long_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "MAX_KEPT_S", 0.0)
    async with workers(says(whole(b"{}"))) as some:
        upstream = Upstream(some[0].url)
        assert await (await upstream.send("GET", b"/x", [])).whole(100) == b"{}"
        await some[0].left.wait()


async def test_what_has_come_on_a_kept_connection_unseen_is_no_answer_to_the_next_request() -> None:
    async with workers(says(whole(b'"own"'))) as some:
        upstream = Upstream(some[0].url)
        assert await (await upstream.send("GET", b"/x", [])).whole(100) == b'"own"'
        (writer,) = some[0].writers
        writer.transport.write(STALE)  # is in the router's socket before its loop can look
        assert await (await upstream.send("GET", b"/x", [])).whole(100) == b'"own"'
        assert some[0].connections == 2
        upstream.cut()


async def test_a_body_of_many_tiny_chunks_lets_others_have_their_turn() -> None:
    count = 100_000
    async with workers(says(_CHUNKS + b"1\r\nx\r\n" * count + b"0\r\n\r\n")) as some:
        upstream = Upstream(some[0].url)
        answer = await upstream.send("GET", b"/x", [])
        ticks, is_done = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not is_done:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        assert await answer.whole(count) == b"x" * count
        is_done = True
        await ticking
        assert ticks >= count / 1000
        upstream.cut()


async def test_a_worker_that_sends_more_than_a_limit_is_let_go() -> None:
    async with workers(endless_body) as some:
        upstream = Upstream(some[0].url)
        with pytest.raises(WorkerLost):
            await (await upstream.send("GET", b"/x", [])).whole(100_000)
        await some[0].left.wait()


async def endless_body(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(STREAM_HEAD)
    while True:
        writer.write(chunk(b"x" * 65536))
        await writer.drain()


async def test_a_query_that_http_cannot_carry_is_its_client_s_fault() -> None:
    async with workers(says(whole(b"{}"))) as some, router(specs(some), CONFIG) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(
            b"POST /generate?a=\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
            b"connection: close\r\n\r\n{}"
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert not some[0].requests and it.state.pool.workers[0].failed == 0


async def test_two_busy_workers_are_asked_again_as_soon_as_they_are_idle() -> None:
    """Each runs one request and queues one; 40 come at once."""
    turn = [asyncio.Semaphore(1), asyncio.Semaphore(1)]
    inside = [0, 0]
    refusal = whole(b'{"error": {"code": "queue_full"}}', 503, more="retry-after: 5\r\n")

    def busy(at: int) -> Callable[..., Awaitable[None]]:
        async def say(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            if inside[at] >= 2:
                writer.write(refusal)
                return
            inside[at] += 1
            async with turn[at]:
                await turns(200)
                inside[at] -= 1
                writer.write(whole(b'"good"'))

        return say

    async with workers(busy(0), busy(1)) as some, router(specs(some), CONFIG) as it:
        burst = await asyncio.gather(*(it.http.post("/generate", json={}) for _ in range(40)))
        statuses = [answer.status_code for answer in burst]
        assert set(statuses) == {200, 503} and statuses.count(503) > 20
        for _ in range(5):
            assert (await it.http.post("/generate", json={})).status_code == 200
        facts = (await it.http.get("/workers")).json()["workers"]
        assert [w["circuit_breaker"] for w in facts] == ["closed", "closed"]


async def test_a_connection_is_used_again_after_an_answer_in_order() -> None:
    async with workers(says(CONTINUE + whole(b"{}")), says(chunked(b"{}"))) as some:
        for worker in some:
            upstream = Upstream(worker.url)
            for _ in range(3):
                assert await (await upstream.send("GET", b"/x", [])).whole(10) == b"{}"
            assert worker.connections == 1
            upstream.cut()
