"""How much one server process can carry: `python -m benchmarks.front`.

The engine is one that knows every token beforehand, so the figures measure HTTP, chat
templates, tokenizing, detokenizing and streaming. CPU time per token is the figure to compare: it
says the same on a busy machine, and its inverse is what one core carries. Where there are two
cores, the server has one, and load generator and engine the other.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from banyan.bench.http import HttpClient, HttpResponse
from banyan.bench.report import percentile
from banyan.bench.serving import run_load
from benchmarks.machine import Command, ServerProcess, threads_cpu_s

ROUTE = "/v1/chat/completions"
_START_S = 120.0
_RATES = "tokens/s of the engine; when the server is too slow, a chunk has more than one"
_WORDS = "A banyan grows new roots from its branches, and each becomes a trunk. "


@dataclass(frozen=True)
class Watched:
    """A running server."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        return threads_cpu_s(self.process.pid)


@dataclass(frozen=True)
class Streamed:
    """What a run of streams came to.

    Attributes:
        cpu_s: of the server process.
        chunks: events with text.
        client_share: of one core, for the load generator.
    """

    tokens: int
    chunks: int
    seconds: float
    cpu_s: float
    client_share: float

    def keys(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_chunk": self.tokens / self.chunks,
            "cpu_us_per_token": self.cpu_s / self.tokens * 1e6,
            "cpu_us_per_chunk": self.cpu_s / self.chunks * 1e6,
            "tokens_per_cpu_s": self.tokens / self.cpu_s,
            "server_cpu_share": self.cpu_s / self.seconds,
            "client_cpu_share": self.client_share,
        }


@contextlib.contextmanager
def watched(rate: float, model: str, log: Path, notes: Path | None = None) -> Iterator[Watched]:
    """A server whose engine says `rate` tokens a second, over all requests.

    Args:
        notes: what the server's loop noted is written here when it ends; None = it notes nothing,
            which takes processor time.
    """
    port = free_port()
    words = [sys.executable, "-m", "benchmarks.watched_server", f"{rate}", str(notes or ""), model]
    words += ["--port", str(port), "--context-length", "1000000"]
    variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    command = Command(words, port, variables, os.getcwd())
    cores = os.sched_getaffinity(0)
    running = ServerProcess(command, log)
    try:
        running.first_answer({"prompt": "x", "max_tokens": 1}, _START_S)
        _part_cores(running.pid)
        yield Watched(running.url, psutil.Process(running.pid))
    finally:
        os.sched_setaffinity(0, cores)
        running.stop()


async def stream(server: Watched, streams: int, tokens: int, rounds: int) -> Streamed:
    """`rounds` times `streams` chats at once, of `tokens` tokens each."""
    http, asked = HttpClient(server.url), body("Tell me about banyans.", tokens)
    await http.request("POST", ROUTE, body("Hello", 8))
    cpu_s = server.cpu_s()

    async def one(_: int) -> HttpResponse:
        return await http.request("POST", ROUTE, asked)

    run = await run_load(streams * rounds, one, [0.0] * streams * rounds, streams)
    cpu_s = server.cpu_s() - cpu_s
    http.close()
    found = [count(outcome) for outcome in run.outcomes]
    return Streamed(
        sum(made for made, _ in found),
        sum(chunks for _, chunks in found),
        run.duration_s,
        cpu_s,
        run.watch.cpu_share,
    )


async def tokenize_meanwhile(
    server: Watched, streams: int, prompt_bytes: int, times: int
) -> list[tuple[float, float]]:
    """Send long prompts one after the other while chats stream; when each was being read."""
    http = HttpClient(server.url)
    quiet = body("Tell me about banyans.", 1 << 20)
    background = [asyncio.create_task(http.request("POST", ROUTE, quiet)) for _ in range(streams)]
    long = body((_WORDS * (prompt_bytes // len(_WORDS) + 1))[:prompt_bytes], 1)
    spans = []
    await asyncio.sleep(0.5)
    for _ in range(times):
        began_s = time.monotonic()
        reply = await http.request("POST", ROUTE, long)
        count(reply)
        spans.append((began_s, time.monotonic()))
        await asyncio.sleep(0.2)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    http.close()
    return spans


def lag_ms(notes: Path, spans: list[tuple[float, float]]) -> dict[str, float]:
    """How late the server's loop was within `spans`, milliseconds."""
    noted = json.loads(notes.read_text())
    late = [1e3 * s for at_s, s in noted if any(a <= at_s <= b for a, b in spans)]
    return {
        "prompts": len(spans),
        "seconds_per_prompt": sum(b - a for a, b in spans) / len(spans),
        "loop_lag_p50_ms": percentile(late, 50),
        "loop_lag_p99_ms": percentile(late, 99),
        "loop_lag_max_ms": max(late),
    }


def body(text: str, tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def count(outcome: object) -> tuple[int, int]:
    """(tokens that the server counted, chunks with text) of an answer that must be whole."""
    if not isinstance(outcome, HttpResponse) or outcome.status != 200:
        text = outcome.body[:300] if isinstance(outcome, HttpResponse) else outcome
        raise SystemExit(f"a stream failed: {text!r}")
    events = outcome.body.split(b"\n\n")
    assert events[-2] == b"data: [DONE]", events[-2]
    usage = orjson.loads(events[-3].removeprefix(b"data: "))["usage"]
    return usage["completion_tokens"], len(events) - 5  # first, last, usage, [DONE], ""


def _part_cores(pid: int) -> None:
    """The server on one core; its engine and this process on the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    server = psutil.Process(pid)
    for thread in server.threads():
        os.sched_setaffinity(thread.id, cores[:1])
    for process in (psutil.Process(), *server.children()):
        os.sched_setaffinity(process.pid, cores[1:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _print(title: str, keys: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, value in keys.items():
        print(f"  {name:<20} {value:12,.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front", description=__doc__)
    parser.add_argument("--model", default="demo", help="whose tokenizer and chat template")
    parser.add_argument("--rates", type=float, nargs="+", default=[8000, 24000], help=_RATES)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-bytes", type=int, default=1 << 20)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--lag-streams", type=int, default=8)
    parser.add_argument("--lag-rate", type=float, default=800, help="tokens/s meanwhile")
    parser.add_argument("--out", help="append the figures to this file, as a line of JSON")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log, notes = Path(folder) / "log", Path(folder) / "notes"
        for rate in options.rates:
            with watched(rate, options.model, log) as server:
                run = stream(server, options.streams, options.tokens, options.rounds)
                found = figures[f"rate {rate:g}"] = asyncio.run(run).keys()
            _print(f"{options.streams} streams, engine at {rate:,.0f} tokens/s", found)
        with watched(options.lag_rate, options.model, log, notes) as server:
            size = options.prompt_bytes
            load = tokenize_meanwhile(server, options.lag_streams, size, options.prompts)
            spans = asyncio.run(load)
        figures["lag"] = lag_ms(notes, spans)
        _print(f"lag of the server's loop while {size:,} bytes are read", figures["lag"])
    if options.out:
        with open(options.out, "ab") as file:
            file.write(orjson.dumps(figures) + b"\n")


if __name__ == "__main__":
    main()
