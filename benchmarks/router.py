"""What a router adds: `python -m benchmarks.router`.

It forwards to two servers that answer at once, so the figures are of the router alone;
with --pairs each request goes to both, as to a prefill and a decode server.
Requests are sent at a rate, in turn directly and through the router; then streams run through it as
fast as they can. CPU time is the figure to compare: it says the same on a busy machine.
"""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import orjson
import psutil

from banyan.bench.http import HttpClient, HttpResponse
from banyan.bench.report import percentile

ROUTE = "/v1/completions"
_WHOLE = orjson.dumps({"id": "x", "object": "text_completion", "choices": [{"text": "a " * 100}]})
_EVENT = b'data: {"id": "x", "object": "text_completion", "choices": [{"text": "word "}]}\n\n'
_START_S = 30.0


@dataclass(frozen=True)
class Sent:
    """One run at a rate.

    Attributes:
        late_ms: how late the load generator was, at most; it has to be small.
    """

    times_ms: list[float]
    late_ms: float
    cpu_s: float

    def keys(self) -> dict[str, float]:
        return {
            "requests": len(self.times_ms),
            "p50_ms": percentile(self.times_ms, 50),
            "p99_ms": percentile(self.times_ms, 99),
            "generator_late_ms": self.late_ms,
        }


async def instant(scope: dict, receive: object, send: object) -> None:
    """A raw ASGI application that answers at once; n events where a stream is asked for."""
    assert callable(receive) and callable(send)
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    asked = orjson.loads(body) if body else {}
    if not asked.get("stream"):
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_WHOLE))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": _WHOLE})
        return
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for _ in range(asked["max_tokens"]):
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await asyncio.sleep(0)  # each event is a write of its own
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def serve_instant(port: int) -> None:
    import uvicorn

    uvicorn.run(instant, port=port, log_level="warning", loop="uvloop", http="httptools")


@contextlib.contextmanager
def started(*words: str) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-m", *words])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, path: str) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + path).status_code == 200:
                return
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{url} did not start within {_START_S:g} s")
        time.sleep(0.05)


async def at_rate(
    url: str, rate: float, seconds: float, prompt: str, router: psutil.Process
) -> Sent:
    """Requests at random moments, `rate` a second in the mean."""
    server = HttpClient(url)
    lots = random.Random(1)
    before_s = _cpu_s(router)
    began_s = due_s = time.perf_counter()
    times: list[float] = []
    late_s = 0.0
    open_: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        body = orjson.dumps({"model": "x", "prompt": f"{prompt}{number}", "max_tokens": 1})
        reply = await server.request("POST", ROUTE, body)
        assert reply.status == 200 and reply.body == _WHOLE, reply.status
        times.append((reply.pieces[-1][0] - reply.started) * 1e3)

    number = 0
    while due_s - began_s < seconds:
        now = time.perf_counter()
        if now < due_s:
            await asyncio.sleep(due_s - now)
        late_s = max(late_s, time.perf_counter() - due_s)
        task = asyncio.create_task(one(number))
        open_.add(task)
        task.add_done_callback(open_.discard)
        number += 1
        due_s += lots.expovariate(rate)
    await asyncio.gather(*open_)
    server.close()
    return Sent(times, late_s * 1e3, _cpu_s(router) - before_s)


async def streams(url: str, count: int, events: int, router: psutil.Process) -> dict[str, float]:
    server = HttpClient(url)
    body = orjson.dumps({"model": "x", "prompt": "x", "max_tokens": events, "stream": True})
    before_s, began_s = _cpu_s(router), time.perf_counter()
    replies = await asyncio.gather(*(server.request("POST", ROUTE, body) for _ in range(count)))
    seconds, cpu_s = time.perf_counter() - began_s, _cpu_s(router) - before_s
    server.close()
    assert all(_is_whole(reply, events) for reply in replies)
    made = count * events
    return {"events_per_s": made / seconds, "router_cpu_us_per_event": cpu_s / made * 1e6}


def _is_whole(reply: HttpResponse, events: int) -> bool:
    return reply.status == 200 and reply.body == _EVENT * events + b"data: [DONE]\n\n"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _part_cores(router: psutil.Process, others: list[psutil.Process]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for thread in router.threads():
        os.sched_setaffinity(thread.id, cores[:1])
    for process in others:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores[1:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _print(title: str, keys: dict[str, float]) -> None:
    print(title + "  " + "  ".join(f"{name} {value:.3g}" for name, value in keys.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instant", type=int, help="serve at this port (used by itself)")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--pairs", action="store_true", help="as a prefill and a decode server")
    parser.add_argument("--policy", nargs="+", default=["round_robin", "cache_aware"])
    given = parser.parse_args()
    if given.instant:
        serve_instant(given.instant)
        return
    ports = [_free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    prompt = "banyan " * (given.prompt_bytes // 7)
    for policy in given.policy:
        flags = ["--policy", policy, "--port", str(ports[2]), "--log-level", "error"]
        targets = ["--worker-urls", *urls[:2]]
        if given.pairs:
            targets = ["--pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
        with (
            started("benchmarks.router", "--instant", str(ports[0])) as first,
            started("benchmarks.router", "--instant", str(ports[1])) as second,
            started("banyan.launch_router", *targets, *flags) as router,
        ):
            for url, path in zip(urls, ("/health", "/health", "/readyz"), strict=True):
                wait_for(url, path)
            _part_cores(router, [first, second, psutil.Process()])
            print(f"\n{policy}: {given.rate:g} requests/s, prompts of {len(prompt)} bytes")
            asyncio.run(at_rate(urls[2], given.rate, 1.0, prompt, router))
            direct = asyncio.run(at_rate(urls[0], given.rate, given.seconds, prompt, router))
            routed = asyncio.run(at_rate(urls[2], given.rate, given.seconds, prompt, router))
            _print("  direct ", direct.keys())
            per_request = routed.cpu_s / len(routed.times_ms) * 1e6
            _print("  routed ", {**routed.keys(), "router_cpu_us_per_request": per_request})
            added = {
                f"added_p{p}_ms": percentile(routed.times_ms, p) - percentile(direct.times_ms, p)
                for p in (50, 99)
            }
            _print("  so     ", added)
            _print("  streams", asyncio.run(streams(urls[2], given.streams, given.events, router)))


if __name__ == "__main__":
    main()
