"""Callers of a router stay apart at servers that know the router by a key of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from banyan.base.errors import ConfigError, RequestError
from banyan.config.schema import ServerConfig
from banyan.router.config import VisibilityConfig, WorkerSpec
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.auth import SIGNATURE_S, TENANT, TenantSigner, Verdict, open_signer
from tests.router.fakes import BASE, router, says, until, whole, workers
from tests.server.fakes import Site

pytestmark = pytest.mark.asyncio
ALICE, BOB, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob", "root"))
KEYS = replace(BASE, server=ServerConfig(port=0, api_key="alice bob", admin_api_key="root"))
ASKED = ("POST", "/generate")
SIGNED = replace(KEYS, secret="long random text")


@asynccontextmanager
async def routed() -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """A server with one key, which it shares with a router that has several."""
    with Site(ServerConfig(api_key="worker-key")).serving() as site:
        site.state.signer = open_signer(SIGNED.secret)
        spec = WorkerSpec(site.url, api_key="worker-key")
        async with router([spec], SIGNED, key="root") as it:
            yield site, it.http


async def test_a_response_belongs_to_the_key_that_made_it() -> None:
    async with routed() as (_, http):
        body = {"model": "tiny", "input": "SECRET", "request_id": "resp_known"}
        made = await http.post("/v1/responses", json=body, headers=ALICE)
        assert made.status_code == 200 and made.json()["id"] == "resp_known"
        later = {"model": "tiny", "input": "b", "previous_response_id": "resp_known"}
        for by, status in ((BOB, 404), (ALICE, 200)):
            assert (await http.get("/v1/responses/resp_known", headers=by)).status_code == status
            answer = await http.post("/v1/responses", json=later, headers=by)
            assert answer.status_code == status
        for by, status in ((BOB, 404), (ALICE, 200)):
            gone = await http.delete("/v1/responses/resp_known", headers=by)
            assert gone.status_code == status


async def test_prefixes_and_shares_are_those_of_the_key() -> None:
    async with routed() as (site, http):
        for by in (ALICE, BOB, ALICE):
            await http.post("/generate", json={"text": "SECRET"}, headers=by)
        asked = [request.message for request in site.generator.asked]
        assert asked[0].namespace == asked[2].namespace != asked[1].namespace
        assert asked[0].caller == asked[2].caller != asked[1].caller


async def test_requests_are_ended_by_their_key_or_an_administrator() -> None:
    async with routed() as (site, http):
        site.generator.hold_after = 1
        body = {"text": "a", "stream": True, "rid": "job"}

        async def abort(by: dict[str, str], **what: object) -> int:
            answer = await http.post("/abort_request", json=what, headers=by)
            return answer.json()["workers"][0]["body"]["aborted"]

        async with http.stream("POST", "/generate", json=body, headers=ALICE) as open_:
            lines = open_.aiter_lines()
            await anext(lines)
            for by, count in ((BOB, 0), (ALICE, 1), (ADMIN, 1)):
                assert await abort(by, rid="job") == count
                assert await abort(by, abort_all=True) == count


@pytest.mark.parametrize("server", [KEYS.server, ServerConfig(api_key_file="keys.yaml")])
async def test_a_key_that_would_hide_the_callers_is_refused_by_name(server: ServerConfig) -> None:
    spec = WorkerSpec("http://127.0.0.1:9", api_key="worker-key")
    pool = replace(BASE.pool, workers=(spec,))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 has a key of its own.*BANYAN_DIST_SEC"):
        WorkerPool(replace(BASE, server=server, pool=pool))
    WorkerPool(replace(BASE, server=server, pool=pool, secret="s"))
    WorkerPool(replace(BASE, server=ServerConfig(api_key="one"), pool=pool))
    async with router([], KEYS, ready=False, key="root") as it:
        added = {"url": spec.url, "api_key": spec.api_key}
        refused = await it.http.post("/workers", json=added)
        assert refused.status_code == 400 and "BANYAN_DIST_SECRET" in refused.text


async def test_only_a_valid_signature_names_a_caller() -> None:
    now = 1e9
    signer = TenantSigner("a", lambda: now)
    value = signer.sign(b"tenant", True, *ASKED)
    assert signer.read(value, Verdict(200), *ASKED).caller.tenant == b"tenant"
    assert not signer.read(value, Verdict(200), *ASKED).is_admin
    assert signer.read(value, Verdict(200, is_admin=True), *ASKED).is_admin
    tenant, is_admin, time_s, mac = value.split(".")
    other = b"other".hex()
    forged = [
        f"{other}.{is_admin}.{time_s}.{mac}",
        f"{tenant}.0.{time_s}.{mac}",
        f"{tenant}.{is_admin}.{int(time_s) + 1}.{mac}",
        TenantSigner("b", lambda: now).sign(b"tenant", True, *ASKED),
        *("", ".", "....", "\xff", mac, value + "0", value[:-1]),
    ]
    for each in forged:
        with pytest.raises(RequestError) as caught:
            signer.read(each, Verdict(200), *ASKED)
        assert caught.value.status == 401
    for asked in (("GET", "/generate"), ("POST", "/generate/"), ("POST", "/abort_request")):
        with pytest.raises(RequestError):
            signer.read(value, Verdict(200), *asked)
    for apart_s in (SIGNATURE_S + 1, -SIGNATURE_S - 1):
        now = 1e9 + apart_s
        with pytest.raises(RequestError):
            signer.read(value, Verdict(200), *ASKED)


async def test_a_header_of_a_client_reaches_no_server_and_is_ignored_without_a_secret() -> None:
    forged = TenantSigner("guessed").sign(b"tenant", True, *ASKED)
    async with (
        workers(says(whole(b"{}"))) as some,
        router([WorkerSpec(some[0].url)], KEYS, key="root") as it,
    ):
        await it.http.post("/generate", json={"text": "a"}, headers={**ALICE, TENANT: forged})
        assert TENANT not in {name.lower() for name in some[0].requests[0].headers}
    with Site(ServerConfig(api_key="key")).serving() as site:
        headers = {"authorization": "Bearer key", TENANT: forged}
        ask = {"json": {"text": "a"}, "headers": headers}
        assert (await asyncio.to_thread(site.http.post, "/generate", **ask)).status_code == 200
        site.state.signer = open_signer("another")
        assert (await asyncio.to_thread(site.http.post, "/generate", **ask)).status_code == 401


@pytest.mark.parametrize("shows", [False, True])
async def test_workers_are_shown_to_administrators_and_to_whom_they_allow(shows: bool) -> None:
    config = replace(KEYS, visibility=VisibilityConfig(shows))
    bad = says(whole(b'{"secret": "reason"}', 503))
    async with workers(bad) as some, router([WorkerSpec(some[0].url)], config, key="root") as it:
        address = some[0].url.removeprefix("http://")
        paths = ("/server_info", "/get_load", "/v1/loads", "/requests", "/health_generate")
        for path in paths:
            answer = await it.http.get(path, headers=ALICE)
            assert (address in answer.text) == shows, path
        assert address in (await it.http.get("/requests", headers=ADMIN)).text
        await some[0].stop()
        for writer in some[0].writers:
            writer.close()
        answer = await it.http.post("/generate", json={"text": "a"}, headers=ALICE)
        assert answer.status_code == 503 and (address in answer.text) == shows
        it.state.pool.workers[0].record_check("no answer")
        for path in ("/health", "/readyz"):
            await until(lambda: bool(it.state.pool.trouble()))
            assert (address in (await it.http.get(path)).text) == shows, path
