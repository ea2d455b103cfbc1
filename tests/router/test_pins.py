"""Pins through a router: one name for all workers, and every answer reported."""

import pytest

from banyan.router.config import DECODE, PREFILL, WorkerSpec
from tests.router.fakes import FakeWorker, router, says, specs, until, whole, workers
from tests.router.test_pairs import PAIRED

pytestmark = pytest.mark.asyncio
KEPT = says(whole(b'{"pin": "x", "cached_tokens": 0}'))
FULL = says(whole(b'{"error": {"message": "256 prefixes are"}}', 400))
NONE = says(whole(b'{"error": {"message": "there is no pin"}}', 404))


@pytest.mark.parametrize("body", [b'{"text": "a",  "ttl_s": 5.0}', b"{}", b' {"input_ids":[1]}'])
async def test_all_workers_get_one_name_and_the_rest_of_the_body_as_it_was(body: bytes) -> None:
    async with workers(KEPT, KEPT) as some, router(specs(some)) as it:
        answer = await it.http.post("/pin_prefix", content=body)
        assert answer.status_code == 200 and answer.json()["success"]
        sent = [worker.requests[0] for worker in some]
        assert {request.fields["rid"] for request in sent} == {answer.json()["pin"]}
        assert all(request.body.endswith(body.strip()[1:]) for request in sent)


async def test_a_name_that_is_given_is_kept() -> None:
    async with workers(KEPT) as some, router(specs(some)) as it:
        body = b'{"text":"a", "rid": "mine"}'
        assert (await it.http.post("/pin_prefix", content=body)).json()["pin"] == "mine"
        assert some[0].requests[0].body == body


async def test_one_that_cannot_keep_it_and_one_that_is_away_are_reported() -> None:
    away = FakeWorker(health=whole(b"", 503))
    await away.start()
    async with (
        workers(KEPT, FULL) as some,
        router([*specs(some), WorkerSpec(away.url)], ready=False) as it,
    ):
        await until(lambda: sum(w.is_well for w in it.state.pool.workers) == 2)
        answer = await it.http.post("/pin_prefix", json={"text": "a"})
        found = answer.json()
        assert answer.status_code == 400 and found["success"] is False
        assert [worker["status"] for worker in found["workers"]] == [200, 400]
        assert "256 prefixes" in str(found["workers"][1]["body"])
        assert [worker["worker"] for worker in found["not_asked"]] == [away.url]
        assert not away.requests
    await away.stop()


async def test_letting_go_counts_those_that_had_it() -> None:
    one = says(whole(b'{"unpinned": 1}'))
    async with workers(one, NONE) as some, router(specs(some)) as it:
        answer = await it.http.post("/unpin_prefix", json={"pin": "x"})
        assert answer.status_code == 200 and answer.json()["unpinned"] == 1
    async with workers(NONE, NONE) as some, router(specs(some)) as it:
        assert (await it.http.post("/unpin_prefix", json={"pin": "x"})).status_code == 404


async def test_servers_of_pairs_keep_none() -> None:
    async with workers(KEPT, KEPT) as (prefill, decode):
        found = [WorkerSpec(prefill.url, PREFILL, 77), WorkerSpec(decode.url, DECODE)]
        async with router(found, PAIRED) as it:
            assert (await it.http.post("/pin_prefix", json={"text": "a"})).status_code == 501
            assert not prefill.requests and not decode.requests


async def test_without_a_worker_nothing_is_pinned() -> None:
    async with router([]) as it:
        assert (await it.http.post("/pin_prefix", json={"text": "a"})).status_code == 503
