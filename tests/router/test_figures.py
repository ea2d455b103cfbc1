"""What a router counts, as Prometheus reads it."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from banyan.base.errors import ConfigError
from banyan.router.config import HealthConfig, PolicyConfig, PrometheusConfig
from banyan.router.lifecycle import open_metrics
from tests.router.fakes import (
    BASE,
    STREAM_HEAD,
    Request,
    chunk,
    router,
    says,
    specs,
    until,
    whole,
    workers,
)
from tests.system.serving import free_port

pytestmark = pytest.mark.asyncio

COUNTED = replace(
    BASE,
    observe=replace(BASE.observe, metrics=True),
    policy=PolicyConfig(name="round_robin"),
)


async def test_requests_retries_and_failures_are_counted_by_route_and_worker() -> None:
    async def breaks_off(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        writer.transport.abort()

    async with (
        workers(says(whole(b"{}", 503)), says(whole(b"{}"))) as some,
        router(specs(some), COUNTED) as it,
    ):
        for _ in range(4):
            assert (await it.http.post("/generate", json={})).status_code == 200
        assert (await it.http.post("/tokenize", content=b"{}")).status_code == 200
        some[1].say = breaks_off
        some[0].say = breaks_off
        await it.http.post("/v1/completions", json={"stream": True})
        text = (await it.http.get("/metrics")).text
        for line in (
            'sgl_router_requests_total{route="/generate"} 4.0',
            'sgl_router_retries_total{route="/generate"} 4.0',
            'sgl_router_broken_streams_total{route="/v1/completions"} 1.0',
            'sgl_router_request_duration_seconds_count{route="/generate"} 4.0',
            f'sgl_router_worker_health{{worker="{some[0].url}"}} 1.0',
            f'sgl_router_running_requests{{worker="{some[1].url}"}} 0.0',
            f'sgl_router_cb_state{{worker="{some[0].url}"}} 0.0',
            "sgl_router_active_workers 2.0",
        ):
            assert line in text.splitlines(), text
        assert 'sgl_router_request_errors_total{route="/generate"}' not in text


async def test_nothing_is_counted_unless_asked_for() -> None:
    async with router([], ready=False) as it:
        answer = await it.http.get("/metrics")
        assert answer.status_code == 404 and "--enable-metrics" in answer.text


async def test_figures_have_a_port_and_bounds_of_their_own_where_they_are_given() -> None:
    port = free_port()
    config = replace(COUNTED, prometheus=PrometheusConfig(port, "127.0.0.1", (0.5, 7.0)))
    async with workers(says(whole(b"{}"))) as some, router(specs(some), config) as it:
        await it.http.post("/generate", json={})
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        assert 'duration_seconds_bucket{le="7.0",route="/generate"} 1.0' in text
        assert 'le="0.25"' not in text
        with pytest.raises(ConfigError, match=f"--prometheus-port {port}"):
            open_metrics(config, it.state.pool)


async def test_a_stream_of_a_worker_that_is_stopped_ends_with_one_error() -> None:
    async def stops(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await asyncio.sleep(60)

    health = HealthConfig(interval_s=0.05, first_interval_s=0.05, timeout_s=1.0, failures=2)
    config = replace(COUNTED, health=health)
    async with workers(stops) as (worker,), router(specs([worker]), config) as it:
        got = b""
        async with it.http.stream("POST", "/generate", json={}) as answer:
            async for piece in answer.aiter_raw():
                got += piece
                worker.health = b""  # it says nothing more
        assert got.startswith(b"data: 1\n\n") and got.endswith(b"data: [DONE]\n\n")
        assert got.count(b"worker_lost") == 1 and got.count(b"data: ") == 3
        await until(lambda: it.state.pool.workers[0].open == 0)
