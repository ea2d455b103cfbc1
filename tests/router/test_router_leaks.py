"""Requests leave nothing in a router: what is alive after many of a kind is what was alive
before. Router, servers and clients are all in this process.
"""

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Awaitable, Callable

import httpx
import orjson
import pytest

from tests.router.fakes import (
    STREAM_HEAD,
    FakeWorker,
    Request,
    chunk,
    router,
    specs,
    until,
    whole,
    workers,
)

pytestmark = pytest.mark.asyncio

ROUND, ROUNDS = 60, 10
LEFT = ROUND // 2
"""Objects that may be left of a round; one dictionary for each request would be more."""

Kind = Callable[[httpx.AsyncClient, int], Awaitable[None]]


async def answer(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """As a server: with an id of its own, streamed, endless, broken off, or busy."""
    asked = orjson.loads(request.body) if request.body else {}
    if asked.get("text") == "cut":
        writer.close()
    elif asked.get("text") == "busy":
        writer.write(whole(b'{"error": {"code": "queue_full"}}', 503, more="retry-after: 1\r\n"))
    elif asked.get("stream"):
        writer.write(STREAM_HEAD + chunk(b"data: {}\n\n") * 3)
        if asked.get("text") == "endless":
            await reader.read()
            writer.close()
            return
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    else:
        writer.write(whole(orjson.dumps({"id": f"resp_{asked.get('number')}"})))
    await writer.drain()


def post(path: str, **body: object) -> Kind:
    async def ask(http: httpx.AsyncClient, number: int) -> None:
        await http.post(path, json={**body, "number": number, "rid": f"r-{number}"})

    return ask


async def stream(http: httpx.AsyncClient, number: int) -> None:
    body = {"text": f"{number % 24}", "stream": True}
    async with http.stream("POST", "/generate", json=body) as events:
        assert (await events.aread()).endswith(b"[DONE]\n\n")


async def leave(http: httpx.AsyncClient, number: int) -> None:
    body = {"text": "endless", "stream": True}
    async with http.stream("POST", "/generate", json=body) as events:
        async for _ in events.aiter_raw():
            break


async def look(http: httpx.AsyncClient, number: int) -> None:
    for path in ("/v1/models", "/livez", f"/v1/responses/resp_{number}", "/nowhere"):
        await http.get(path)


KINDS: dict[str, Kind] = {
    "whole": post("/generate", text="a"),
    "responses": post("/v1/responses", input="a"),
    "aborts": post("/abort_request"),
    "streams": stream,
    "clients that leave": leave,
    "looks": look,
    "servers that break off": post("/generate", text="cut"),
    "servers that are busy": post("/generate", text="busy"),
    "bodies that are refused": post("/generate", text=7, stream="no"),
}


def alive(some: list[FakeWorker]) -> int:
    for worker in some:
        worker.requests.clear()
        worker.writers = [writer for writer in worker.writers if not writer.is_closing()]
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.parametrize("name", KINDS)
async def test_nothing_is_left_that_grows_with_the_number_of_requests(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bounded stores may still fill: so of some rounds in a row, one must leave nothing."""
    caplog.set_level(logging.CRITICAL, "banyan")  # what is captured would be left
    left: list[int] = []
    async with workers(answer, answer) as some, router(specs(some)) as routed:
        before = alive(some)
        for number in range(ROUNDS):
            for at in range(number * ROUND, (number + 1) * ROUND):
                with contextlib.suppress(httpx.HTTPError):
                    await KINDS[name](routed.http, at)
            await until(lambda: not any(worker.open for worker in routed.state.pool.workers))
            now = alive(some)
            left.append(now - before)
            if number > 1 and left[-1] <= LEFT:
                return
            before = now
    raise AssertionError(f"{ROUND} requests leave {left} objects")
