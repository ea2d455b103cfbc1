"""What sight costs: metrics, traces (1 request in 100) and the flight recorder against none.

Two servers of one model stand beside each other, and streams go to one and the other in turn, so
that what else the machine does falls on both:

    python -m benchmarks.sight [--model demo] [--pairs 5] [--streams 32] [--tokens 64]
"""

import argparse
import http.client
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from statistics import median

import psutil

READY_S = 400.0
NONE = ("--flight-recorder-bytes", "0")
SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}


class Collector(BaseHTTPRequestHandler):
    """Takes spans and keeps none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[int, psutil.Process]]:
    """(port, process) of a server that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "banyan.launch_server", "--port", str(port)]
    command += ["--model-path", model, "--log-level", "error", *flags]
    process = subprocess.Popen(command, env={**os.environ, **SAMPLED}, start_new_session=True)
    try:
        end_s = time.monotonic() + READY_S
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{command} is not ready")
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream(port: int, number: int, tokens: int) -> int:
    """Tokens of one stream, read event by event."""
    prompt = [100 + (number * 7 + i) % 300 for i in range(32)]
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
    connection.request("POST", "/generate", json.dumps(body))
    events = [line for line in connection.getresponse() if line.startswith(b"data: {")]
    connection.close()
    return json.loads(events[-1][6:])["meta_info"]["completion_tokens"]


def cpu_s(process: psutil.Process) -> float:
    """Of a server and its engines."""
    some = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in some)


def load(
    port: int, process: psutil.Process, streams: int, rounds: int, tokens: int
) -> tuple[float, float]:
    """(tokens a second, processor seconds a token)."""
    began_s, cpu_before = time.monotonic(), cpu_s(process)
    with ThreadPoolExecutor(streams) as pool:
        got = sum(pool.map(lambda n: stream(port, n, tokens), range(streams * rounds)))
    return got / (time.monotonic() - began_s), (cpu_s(process) - cpu_before) / got


def middle(ratios: list[float]) -> str:
    """The median, and the two values between which that of all pairs lies (order statistics)."""
    rising, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low = max(0, math.floor(len(ratios) / 2 - half))
    high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half) - 1)
    return f"{median(ratios):.3f} ({rising[low]:.3f} – {rising[high]:.3f})"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sight")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="requests of each stream")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{sink.server_port}"
    seen = ("--enable-metrics", "--enable-trace", "--otlp-traces-endpoint", endpoint)
    load_of = (options.streams, options.rounds, options.tokens)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(options.model, *flags)) for flags in (NONE, seen)]
        for server in servers:
            load(*server, *load_of)
        speeds, costs = [], []
        for pair in range(options.pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            found = {which: load(*servers[which], *load_of) for which in order}
            speeds.append(found[1][0] / found[0][0])
            costs.append(found[1][1] / found[0][1])
            print(
                f"pair {pair + 1}: {found[0][0]:8.1f} tokens/s without, {found[1][0]:8.1f} with: "
                f"{speeds[-1]:.3f}; processor time a token {costs[-1]:.3f}",
                flush=True,
            )
    print(
        f"{processor()}; {options.model}, {options.streams} streams, {options.pairs} pairs: with "
        f"sight {middle(speeds)} of the tokens/s without, {middle(costs)} of the processor time a "
        "token (medians, and where these lie with 95 %)"
    )


if __name__ == "__main__":
    main()
