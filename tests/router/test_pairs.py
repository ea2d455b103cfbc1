"""Prefill and decode workers behind a router: what each is sent, and whose answer counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from banyan.router.config import PoolConfig, RetryConfig, WorkerSpec
from tests.router.fakes import (
    BASE,
    STREAM_HEAD,
    FakeWorker,
    Request,
    Routed,
    Say,
    chunk,
    router,
    says,
    until,
    whole,
    workers,
)

pytestmark = pytest.mark.asyncio

PAIRED = replace(BASE, pool=PoolConfig(is_paired=True))
WIRE = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
GOOD = says(whole(b'{"by":"prefill"}'))


@asynccontextmanager
async def pools(
    prefills: list[Say], decodes: list[Say]
) -> AsyncIterator[tuple[list[FakeWorker], list[FakeWorker], Routed]]:
    async with workers(*prefills) as first, workers(*decodes) as second:
        specs = [
            *(WorkerSpec(w.url, "prefill", 8998 + at) for at, w in enumerate(first)),
            *(WorkerSpec(w.url, "decode") for w in second),
        ]
        async with router(specs, PAIRED) as it:
            yield first, second, it


async def refuses(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    raise AssertionError("nobody may ask here")


async def dies(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.transport.abort()


async def hangs(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read(1)
    raise asyncio.IncompleteReadError(b"", 1)


@pytest.mark.parametrize(
    "path, body, count",
    [
        ("/generate", {"text": "a", "rid": "x"}, None),
        ("/generate", {"input_ids": [1, 2]}, None),
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"input_ids": [[1], [2]]}, 2),
        ("/generate", {"input_embeds": [[0.1], [0.2]]}, None),
        ("/generate", {"input_embeds": [[[0.1]], [[0.2]]]}, 2),
        ("/v1/completions", {"prompt": "a"}, None),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": [1, 2]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
    ],
)
async def test_both_get_one_body_with_where_they_meet(
    path: str, body: dict, count: int | None
) -> None:
    async with pools([GOOD], [says(whole(b'{"by":"decode"}'))]) as ((prefill,), (decode,), it):
        rooms: set[int] = set()
        for _ in range(2):
            answer = await it.http.post(path, json=body)
            assert answer.json() == {"by": "decode"}
            await until(lambda: len(prefill.requests) == len(decode.requests))
            sent = prefill.requests[-1].fields
            assert prefill.requests[-1].body == decode.requests[-1].body
            assert {name: value for name, value in sent.items() if name not in WIRE} == body
            given = [sent[name] for name in WIRE]
            if count is None:
                given = [[value] for value in given]
            hosts, ports, numbers = given
            assert (hosts, ports) == (["127.0.0.1"] * (count or 1), [8998] * (count or 1))
            assert len(numbers) == (count or 1) and all(0 <= n < 1 << 63 for n in numbers)
            rooms.update(numbers)
        assert len(rooms) == 2 * (count or 1)


async def test_a_prefill_worker_without_a_port_leaves_it_open() -> None:
    async with workers(GOOD, GOOD) as some:
        specs = [WorkerSpec(some[0].url, "prefill"), WorkerSpec(some[1].url, "decode")]
        async with router(specs, PAIRED) as it:
            await it.http.post("/generate", json={"text": "a"})
            assert some[1].requests[0].fields["bootstrap_port"] is None


@pytest.mark.parametrize(
    ("info", "port"),
    [
        (whole(b'{"disaggregation_bootstrap_port":6657}'), 6657),
        (whole(b'{"disaggregation_bootstrap_port":70000}'), None),
        (whole(b'{"disaggregation_bootstrap_port":true}'), None),
        (whole(b'{"disaggregation_bootstrap_port":6657}', 401), None),
        (whole(b"[]"), None),
        (whole(b"["), None),
    ],
)
async def test_a_prefill_worker_is_asked_for_the_port_that_nobody_gave(
    info: bytes, port: int | None
) -> None:
    async with workers(GOOD, GOOD) as some:
        some[0].info = info
        specs = [WorkerSpec(some[0].url, "prefill"), WorkerSpec(some[1].url, "decode")]
        async with router(specs, PAIRED) as it:
            await it.http.post("/generate", json={"text": "a"})
            assert some[1].requests[0].fields["bootstrap_port"] == port


async def test_the_stream_is_that_of_the_decode_worker() -> None:
    events = [b"data: 1\n\n", b"data: [DONE]\n\n"]
    streams = says(STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")
    async with pools([streams], [streams]) as (_, _, it):
        answer = await it.http.post("/generate", json={"text": "a", "stream": True})
        assert answer.content == b"".join(events)
        await until(lambda: all(w.open == 0 for w in it.state.pool.workers))


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_of_the_prefill_worker_is_the_answer_and_ends_the_other(
    status: int,
) -> None:
    async with pools([says(whole(b'{"no":1}', status))], [hangs]) as (_, (decode,), it):
        answer = await it.http.post("/generate", json={"text": "a"})
        assert (answer.status_code, answer.content) == (status, b'{"no":1}')
        await decode.left.wait()


@pytest.mark.parametrize("side", [0, 1])
async def test_a_side_that_is_lost_is_replaced_and_the_other_may_be_the_same(side: int) -> None:
    sides: list[list[Say]] = [[hangs], [hangs]]
    sides[side] = [dies, says(whole(b'{"by":"it"}'))]
    sides[1 - side] = [says(whole(b'{"by":"it"}'))]
    async with pools(*sides) as (prefills, decodes, it):
        for _ in range(3):
            answer = await it.http.post("/generate", json={"text": "a"})
            assert (answer.status_code, answer.json()) == (200, {"by": "it"})


async def test_a_pair_that_is_refused_is_replaced_by_one_with_somebody_else() -> None:
    """The decode worker tells that the prefill worker was silent; another one does better."""

    async def answers_the_second(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        is_bad = request.fields["bootstrap_port"] == 8998
        writer.write(whole(b'{"n":1}', 504 if is_bad else 200))

    async with pools([hangs, GOOD], [answers_the_second]) as (prefills, (decode,), it):
        for _ in range(3):
            assert (await it.http.post("/generate", json={"text": "a"})).status_code == 200
        prefills[1].say = hangs
        decode.say = says(whole(b'{"n":2}', 504))
        answer = await it.http.post("/generate", json={"text": "a"})
        assert (answer.status_code, answer.json()) == (504, {"n": 2})


async def test_a_client_that_leaves_ends_both_sides() -> None:
    async with pools([hangs], [hangs]) as ((prefill,), (decode,), it):
        asking = asyncio.create_task(it.http.post("/generate", json={"text": "a"}))
        await until(lambda: bool(prefill.requests and decode.requests))
        asking.cancel()
        await prefill.left.wait()
        await decode.left.wait()
        await until(lambda: all(w.open == 0 for w in it.state.pool.workers))


async def test_a_side_without_workers_is_reported_by_its_name() -> None:
    async with workers(GOOD) as (prefill,):
        async with router([WorkerSpec(prefill.url, "prefill")], PAIRED) as it:
            answer = await it.http.post("/generate", json={"text": "a"})
            assert answer.status_code == 503 and "there is no decode worker" in answer.text
            added = {"url": "http://127.0.0.1:1", "worker_type": "regular"}
            assert (await it.http.post("/workers", json=added)).status_code == 400
        assert not prefill.requests


async def test_a_pair_may_come_at_run_time() -> None:
    async with workers(GOOD, says(whole(b'{"by":"decode"}'))) as some, router([], PAIRED) as it:
        await it.http.post(
            "/workers",
            json={"url": some[0].url, "worker_type": "prefill", "bootstrap_port": 77},
        )
        await it.http.post("/workers", json={"url": some[1].url, "worker_type": "decode"})
        await until(lambda: not it.state.pool.trouble())
        assert (await it.http.post("/generate", json={"text": "a"})).json() == {"by": "decode"}
        assert some[1].requests[0].fields["bootstrap_port"] == 77


async def test_what_pairs_do_not_share_is_refused_and_facts_come_from_one() -> None:
    async with pools([GOOD], [refuses]) as ((prefill,), _, it):
        for path in ("/v1/messages", "/v1/embeddings", "/v1/responses", "/api/chat"):
            answer = await it.http.post(path, json={})
            assert answer.status_code == 501 and "/generate" in answer.text, path
        assert (await it.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await it.http.get("/v1/models")).status_code == 200
        assert len(prefill.requests) == 2


async def test_facts_are_grouped_by_pool() -> None:
    infos = [says(whole(b'{"internal_states":[{"n":%d}],"at":%d}' % (n, n))) for n in range(3)]
    async with pools(infos[:1], infos[1:]) as (_, _, it):
        info = (await it.http.get("/get_server_info")).json()
        assert [state["n"] for state in info["internal_states"]] == [1, 2]
        assert [i["at"] for i in info["prefill"]] == [0] and len(info["decode"]) == 2


async def test_a_body_that_is_no_object_is_refused_before_anybody_is_asked() -> None:
    async with pools([refuses], [refuses]) as (_, _, it):
        for body in (b"[1]", b"{", b'{"a":1,"a":2}'):
            assert (await it.http.post("/generate", content=body)).status_code == 400


async def test_without_retries_a_loss_is_reported_at_once() -> None:
    config = replace(PAIRED, retry=RetryConfig(is_off=True))
    async with workers(dies, hangs) as some:
        specs = [WorkerSpec(some[0].url, "prefill"), WorkerSpec(some[1].url, "decode")]
        async with router(specs, config) as it:
            answer = await it.http.post("/generate", json={"text": "a"})
            assert answer.status_code == 503 and some[0].url in answer.text
            await some[1].left.wait()
