"""Requests through a router, to workers with scripted answers."""

import asyncio
from dataclasses import replace

import pytest

from banyan.router.config import (
    BreakerConfig,
    HealthConfig,
    LimitConfig,
    PolicyConfig,
    RetryConfig,
    WorkerSpec,
)
from banyan.router.routes import all_routes
from banyan.server.http.auth import ADMIN
from banyan.server.routes import all_routes as server_routes
from tests.router.fakes import (
    BASE,
    STREAM_HEAD,
    FakeWorker,
    Request,
    chunk,
    router,
    says,
    specs,
    until,
    whole,
    workers,
)

pytestmark = pytest.mark.asyncio

ROUND = replace(BASE, policy=PolicyConfig(name="round_robin"))
EVENTS = [b'data: {"text": "%d"}\n\n' % at for at in range(5)] + [b"data: [DONE]\n\n"]


async def test_a_body_and_its_answer_pass_unchanged() -> None:
    said = b'{"a":  1.0, "b": [ "\\u00e9" ]}'
    async with (
        workers(says(whole(said, more="x-request-id: abc\r\n"))) as some,
        router(specs(some)) as it,
    ):
        sent = b'{ "prompt" : "x",  "unknown": {"z":1} }'
        answer = await it.http.post(
            "/v1/completions?a=b%20c", content=sent, headers={"x-mine": "1"}
        )
        assert answer.content == said and answer.headers["x-request-id"] == "abc"
        (request,) = some[0].requests
        assert (request.body, request.target) == (sent, "/v1/completions?a=b%20c")
        assert request.headers["x-mine"] == "1" and request.headers["host"] == some[0].url[7:]


async def test_each_event_is_passed_on_before_the_next_one_comes() -> None:
    go_on = asyncio.Semaphore(0)

    async def say(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD)
        for event in EVENTS:
            writer.write(chunk(event))
            await go_on.acquire()
        writer.write(chunk(b"")[:-2] + b"\r\n")

    async with workers(say) as some, router(specs(some)) as it:
        got: list[bytes] = []
        async with it.http.stream("POST", "/generate", json={}) as answer:
            assert answer.headers["x-of-worker"] == "yes"
            async for piece in answer.aiter_raw():
                got.append(piece)
                go_on.release()
        assert got == EVENTS


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
async def test_a_stream_arrives_byte_for_byte_however_it_was_cut(size: int) -> None:
    data = b"".join(EVENTS) + b": no end"
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    answer = STREAM_HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    async with workers(says(answer)) as some, router(specs(some)) as it:
        assert (await it.http.post("/generate", json={})).content == data


@pytest.mark.parametrize(
    "path, terminal",
    [
        ("/v1/chat/completions", (b'"reason":"worker_lost"', b"data: [DONE]\n\n")),
        ("/v1/messages", (b"event: error\ndata: ", b'"type":"overloaded_error"')),
        ("/v1/responses", (b"event: error\ndata: ", b'"code":"worker_lost"')),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_one_error_in_its_dialect(
    path: str, terminal: tuple[bytes, bytes]
) -> None:
    async def say(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD + chunk(EVENTS[0]) + chunk(EVENTS[1][:9]))
        await writer.drain()
        writer.transport.abort()

    async with workers(say, say) as some, router(specs(some)) as it:
        got = (await it.http.post(path, json={})).content
        assert got.startswith(EVENTS[0]) and EVENTS[1][:9] not in got.removeprefix(EVENTS[0])[:9]
        assert all(part in got for part in terminal) and got.count(b"worker_lost") <= 1
        assert sum(len(worker.requests) for worker in some) == 1


async def test_a_request_is_sent_elsewhere_while_nothing_was_answered() -> None:
    async def dies(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.transport.abort()

    async def dies_in_its_answer(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(whole(b"0123456789")[:-5])
        await writer.drain()
        writer.transport.abort()

    for bad in (dies, dies_in_its_answer):
        async with workers(bad, says(whole(b'"good"'))) as some, router(specs(some), ROUND) as it:
            for _ in range(2):
                answer = await it.http.post("/generate", json={})
                assert (answer.status_code, answer.content) == (200, b'"good"')
            assert some[0].requests and len(some[1].requests) == 2


async def test_a_request_that_two_workers_were_lost_with_is_not_sent_to_a_third() -> None:
    async def dies(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.transport.abort()

    async with workers(dies, dies, dies) as some, router(specs(some), ROUND) as it:
        answer = await it.http.post("/generate", json={})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_lost"
        assert sum(len(worker.requests) for worker in some) == 2


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_is_the_answer_when_nobody_does_better(status: int) -> None:
    busy = says(whole(b'{"full":1}', status, more="retry-after: 9\r\n"))
    async with workers(busy, busy) as some, router(specs(some), ROUND) as it:
        answer = await it.http.post("/generate", json={})
        assert (answer.status_code, answer.content) == (status, b'{"full":1}')
        assert answer.headers["retry-after"] == "9"
        assert [len(worker.requests) for worker in some] == [1, 1]
        some[1].say = says(whole(b"{}"))
        assert (await it.http.post("/generate", json={})).status_code == 200


async def test_a_failed_request_of_its_own_is_not_sent_again() -> None:
    async with workers(*[says(whole(b"{}", 500))] * 2) as some, router(specs(some)) as it:
        assert (await it.http.post("/generate", json={})).status_code == 500
        assert sum(len(worker.requests) for worker in some) == 1


async def test_retries_can_be_turned_off() -> None:
    config = replace(ROUND, retry=RetryConfig(is_off=True))
    async with workers(*[says(whole(b"{}", 503))] * 2) as some, router(specs(some), config) as it:
        assert (await it.http.post("/generate", json={})).status_code == 503
        assert sum(len(worker.requests) for worker in some) == 1


async def test_nobody_to_ask_is_a_503_with_the_reason() -> None:
    async with router([], ready=False) as it:
        answer = await it.http.post("/generate", json={})
        assert answer.status_code == 503 and "there is no worker" in answer.text
        assert answer.headers["retry-after"]
        assert (await it.http.get("/readyz")).status_code == 503
        assert (await it.http.get("/livez")).status_code == 200
    worker = FakeWorker(health=whole(b'{"reason":"loading"}', 503))
    await worker.start()
    async with router([WorkerSpec(worker.url)], ready=False) as it:
        await until(lambda: "503" in it.state.pool.trouble())
        answer = await it.http.get("/health")
        assert answer.status_code == 503 and "loading" in answer.text and worker.url in answer.text
        worker.health = whole(b"")
        await until(lambda: not it.state.pool.trouble())
        assert (await it.http.get("/readyz")).status_code == 200
    await worker.stop()


async def test_a_worker_that_does_not_answer_its_check_loses_what_it_has() -> None:
    async def hangs(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(60)

    health = HealthConfig(interval_s=0.05, first_interval_s=0.05, timeout_s=1.0, failures=2)
    config = replace(ROUND, health=health)
    async with workers(hangs, says(whole(b'"good"'))) as some, router(specs(some), config) as it:
        asking = asyncio.create_task(it.http.post("/generate", json={}))
        await until(lambda: len(some[0].requests) == 1)
        some[0].health = b""
        assert (await asking).content == b'"good"'
        assert not it.state.pool.workers[0].is_well


async def test_a_worker_that_fails_is_left_alone_and_tried_again() -> None:
    config = replace(
        ROUND,
        breaker=BreakerConfig(failures=2, successes=1, open_s=0.3),
        health=HealthConfig(is_off=True),
    )
    async with (
        workers(says(whole(b"{}", 502)), says(whole(b'"good"'))) as some,
        router(specs(some), config) as it,
    ):
        for _ in range(8):
            assert (await it.http.post("/generate", json={})).status_code == 200
        assert len(some[0].requests) == 2
        facts = (await it.http.get("/workers")).json()["workers"]
        assert [w["circuit_breaker"] for w in facts] == ["open", "closed"]
        some[0].say = says(whole(b'"well"'))
        await until(lambda: it.state.pool.workers[0].takes())
        said = {(await it.http.post("/generate", json={})).content for _ in range(4)}
        assert said == {b'"well"', b'"good"'}


async def test_a_worker_that_comes_back_well_is_asked_at_once() -> None:
    config = replace(ROUND, breaker=BreakerConfig(failures=1, open_s=1000.0))
    async with workers(says(whole(b"{}"))) as (worker,), router(specs([worker]), config) as it:
        await worker.stop()
        it.state.pool.workers[0].upstream.cut()
        assert (await it.http.post("/generate", json={})).status_code == 503
        await until(lambda: not it.state.pool.workers[0].is_well)
        await worker.start()
        await until(lambda: it.state.pool.workers[0].is_well)
        assert (await it.http.post("/generate", json={})).status_code == 200


async def test_a_client_that_leaves_closes_the_way_to_the_worker() -> None:
    async def says_a_little(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD + chunk(EVENTS[0]))
        await reader.read(1)  # until the other end closes
        raise asyncio.IncompleteReadError(b"", 1)

    async with workers(says_a_little) as some, router(specs(some)) as it:
        async with it.http.stream("POST", "/generate", json={}) as answer:
            await anext(answer.aiter_raw())
            assert it.state.pool.workers[0].open == 1
        await some[0].left.wait()
        await until(lambda: it.state.pool.workers[0].open == 0)
        assert it.state.pool.workers[0].failed == 0


async def test_a_worker_is_read_no_faster_than_its_client() -> None:
    sent = 0

    async def floods(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        writer.write(STREAM_HEAD)
        event = b"data: " + b"x" * 65536 + b"\n\n"
        while True:
            writer.write(chunk(event))
            await writer.drain()
            sent += len(event)

    async with workers(floods) as some, router(specs(some)) as it:
        _, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 64 << 20
        writer.transport.abort()
        await some[0].left.wait()


async def test_a_key_is_wanted_and_goes_on_to_the_worker() -> None:
    config = replace(BASE, server=replace(BASE.server, api_key="secret"))
    async with workers(says(whole(b"{}")), says(whole(b"{}"))) as some:
        named = [WorkerSpec(some[0].url), WorkerSpec(some[1].url, api_key="other")]
        config = replace(config, policy=PolicyConfig(name="round_robin"))
        async with router(named, config, key="secret") as it:
            for _ in range(2):
                assert (await it.http.post("/generate", json={})).status_code == 200
            given = [worker.requests[0].headers["authorization"] for worker in some]
            assert given == ["Bearer secret", "Bearer other"]
            it.http.headers["authorization"] = "Bearer wrong"
            for path in ("/generate", "/workers", "/no_such_route"):
                assert (await it.http.post(path, json={})).status_code == 401
            assert (await it.http.get("/readyz")).status_code == 200


async def test_bounds_of_a_request_are_those_of_a_server() -> None:
    config = replace(BASE, server=replace(BASE.server, max_body_bytes=1000))
    async with workers(says(whole(b"{}"))) as some, router(specs(some), config) as it:
        assert (await it.http.post("/generate", content=b"x" * 1001)).status_code == 413
        assert (await it.http.post("/nowhere", json={})).status_code == 404
        assert (await it.http.get("/generate")).status_code == 405
        assert not some[0].requests


async def test_no_more_requests_are_in_progress_than_may_and_the_rest_wait() -> None:
    go_on = asyncio.Event()

    async def waits(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await go_on.wait()
        writer.write(whole(b"{}"))

    config = replace(BASE, limits=LimitConfig(concurrent=1, waiting=1))
    async with workers(waits) as some, router(specs(some), config) as it:
        asking = [asyncio.create_task(it.http.post("/generate", json={})) for _ in range(2)]
        await until(lambda: it.state.admission.waiting == 1)
        refused = await it.http.post("/generate", json={})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert len(some[0].requests) == 1
        go_on.set()
        assert [(await task).status_code for task in asking] == [200, 200]


async def test_a_request_that_takes_too_long_ends_with_504() -> None:
    async def hangs(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(60)

    config = replace(BASE, limits=LimitConfig(request_s=0.2))
    async with workers(hangs) as some, router(specs(some), config) as it:
        assert (await it.http.post("/generate", json={})).status_code == 504


async def test_workers_come_and_go_while_the_router_runs() -> None:
    async with (
        workers(says(whole(b'"a"')), says(whole(b'"b"'))) as some,
        router(specs(some[:1]), ROUND) as it,
    ):
        added = await it.http.post("/workers", json={"url": some[1].url + "/"})
        assert added.status_code == 202, added.text
        assert (await it.http.post("/workers", json={"url": some[1].url})).status_code == 409
        for wrong in ({"url": "ftp://x"}, {"url": ""}, {"url": "http://x", "cost": 1}):
            assert (await it.http.post("/workers", json=wrong)).status_code == 400
        await until(lambda: all(w.is_well for w in it.state.pool.workers))
        said = {(await it.http.post("/generate", json={})).content for _ in range(2)}
        assert said == {b'"a"', b'"b"'}
        removed = await it.http.post("/remove_worker", params={"url": some[0].url})
        assert removed.status_code == 200
        assert (await it.http.get("/list_workers")).json() == {"urls": [some[1].url]}
        assert (await it.http.post("/generate", json={})).content == b'"b"'
        assert (await it.http.post("/add_worker", params={"url": some[0].url})).status_code == 200
        one = (await it.http.get("/workers")).json()["workers"][1]
        assert (await it.http.delete(f"/workers/{one['id']}")).status_code == 200
        assert (await it.http.delete(f"/workers/{one['id']}")).status_code == 404


async def test_a_worker_that_is_removed_ends_what_it_has_begun() -> None:
    go_on = asyncio.Event()

    async def waits(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD + chunk(EVENTS[0]))
        await go_on.wait()
        writer.write(chunk(EVENTS[-1]) + b"0\r\n\r\n")

    async with workers(waits) as some, router(specs(some)) as it:
        async with it.http.stream("POST", "/generate", json={}) as answer:
            pieces = answer.aiter_raw()
            got = await anext(pieces)
            assert (await it.http.delete("/workers/0")).status_code == 200
            assert (await it.http.post("/generate", json={})).status_code == 503
            go_on.set()
            async for piece in pieces:
                got += piece
        assert got == EVENTS[0] + EVENTS[-1]


async def test_a_prompt_goes_where_its_beginning_went() -> None:
    async with (
        workers(*[says(whole(b"{}"))] * 3) as some,
        router(specs(some), replace(BASE, policy=PolicyConfig(name="cache_aware"))) as it,
    ):
        prompts = [f"{at:03} " * 100 for at in range(6)]
        for round_ in range(4):
            for prompt in prompts:
                body = {"model": "x", "temperature": round_, "prompt": prompt + "end" * round_}
                await it.http.post("/v1/completions", json=body)
        homes = [{str(r.fields["prompt"])[:4] for r in worker.requests} for worker in some]
        assert sum(map(len, homes)) == len(prompts) and all(len(home) == 2 for home in homes)


async def test_a_routing_key_binds_a_client_to_a_worker() -> None:
    async with (
        workers(*[says(whole(b"{}"))] * 3) as some,
        router(specs(some), replace(BASE, policy=PolicyConfig(name="consistent_hashing"))) as it,
    ):
        for at in range(80):
            key = {"x-smg-routing-key": f"client {at % 40}"}
            await it.http.post("/generate", json={}, headers=key)
        homes = [{r.headers["x-smg-routing-key"] for r in worker.requests} for worker in some]
        assert sum(map(len, homes)) == 40 and all(homes)


async def test_a_connection_is_used_again_and_a_stale_one_is_no_error() -> None:
    async def once(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(whole(b"{}"))
        await writer.drain()
        writer.transport.abort()  # says nothing of it before

    async with workers(once) as some, router(specs(some)) as it:
        for _ in range(5):
            assert (await it.http.post("/generate", json={})).status_code == 200
        assert it.state.pool.workers[0].failed == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/9.9 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    ],
)
async def test_an_answer_that_is_no_http_is_the_worker_s_fault(answer: bytes) -> None:
    async with workers(says(answer)) as some, router(specs(some)) as it:
        assert (await it.http.post("/generate", json={})).status_code == 503
        assert it.state.pool.workers[0].failed == 2  # asked once more


async def test_every_route_that_clients_post_to_is_routed_or_refused_by_name() -> None:
    known = {route.path for route in all_routes()}
    asked = {
        route.path
        for route in server_routes()
        if route.is_available and "POST" in route.methods and route.guard != ADMIN
    }
    assert len(asked) > 30 and not asked - known


async def test_what_one_server_keeps_is_refused_with_the_way_out() -> None:
    async with workers(says(whole(b"{}"))) as some, router(specs(some)) as it:
        for path in ("/v1/files", "/v1/batches", "/open_session", "/pause_generation"):
            answer = await it.http.post(path, json={})
            assert answer.status_code == 501 and "worker itself" in answer.text, path
        assert not some[0].requests
