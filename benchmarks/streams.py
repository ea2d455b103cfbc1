"""Servers of the same model with different flags, next to each other on streams of chats:
`python -m benchmarks.streams "plain:" "multi_steps:--num-continuous-decode-steps 8"`.

All of them are up at once and take turns, so a slower minute of the machine slows all. Next to the
tokens per second comes the processor time of the server's own process for each token.
`old@TREE:` is the server of another working tree, for before and after.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from banyan.bench.http import HttpClient, HttpResponse
from banyan.bench.serving import run_load
from benchmarks.front import ROUTE, body, count, free_port
from benchmarks.machine import Command, ServerProcess, threads_cpu_s

_START_S = 120.0
_TOKENS = {1: 192, 8: 128, 32: 64}
"""Of each answer, by how many streams there are; 64 for any other number."""
_HEAD = (
    f"{'streams':>7}  {'server':<12} {'tokens/s':>20} {'front us/token':>20} {'engine cores':>12}"
)


def start(flags: str, model: str, log: Path, tree: str = "") -> ServerProcess:
    port, variables = free_port(), {"PYTHONPATH": tree} if tree else {}
    words = [sys.executable, "-m", "banyan", "serve", "--model-path", model, "--port", str(port)]
    command = Command([*words, *flags.split()], port, variables, tree or os.getcwd())
    return ServerProcess(command, log)


async def streams(server: ServerProcess, number: int, tokens: int) -> tuple[int, float]:
    """(tokens, seconds) of so many chats at once."""
    http, asked = HttpClient(server.url), body("Tell me about banyans.", tokens)

    async def one(_: int) -> HttpResponse:
        return await http.request("POST", ROUTE, asked)

    run = await run_load(number, one, [0.0] * number, number)
    http.close()
    return sum(count(outcome)[0] for outcome in run.outcomes), run.duration_s


def measure(server: ServerProcess, number: int) -> tuple[float, float, float]:
    """(tokens/s, microseconds of the server's process for each token, cores of its engine)."""
    engines = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
    front_s, engine_s = threads_cpu_s(server.pid), sum(map(threads_cpu_s, engines))
    made, took_s = asyncio.run(streams(server, number, _TOKENS.get(number, 64)))
    front_s = threads_cpu_s(server.pid) - front_s
    engine_s = sum(map(threads_cpu_s, engines)) - engine_s
    return made / took_s, front_s / made * 1e6, engine_s / took_s


def _spread(values: list[float], digits: int = 0) -> str:
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("servers", nargs="+", help="NAME[@TREE]:FLAGS of banyan serve")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    servers: dict[str, ServerProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for given in options.servers:
                named, _, flags = given.partition(":")
                name, _, tree = named.partition("@")
                servers[name] = start(flags, options.model, Path(folder) / f"{name}.log", tree)
            for server in servers.values():
                server.first_answer({"prompt": "x", "max_tokens": 1}, _START_S)
                asyncio.run(streams(server, max(options.streams), 8))
            print(_HEAD)
            for number in options.streams:
                _compare(servers, number, options.rounds)
        finally:
            for server in servers.values():
                server.stop()


def _compare(servers: dict[str, ServerProcess], number: int, rounds: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in servers}
    for turn in range(rounds):
        for name in list(servers)[:: -1 if turn % 2 else 1]:
            found[name].append(measure(servers[name], number))
    for name, rows in found.items():
        rates, costs, cores = (list(column) for column in zip(*rows, strict=True))
        print(
            f"{number:>7}  {name:<12} {_spread(rates):>20} {_spread(costs):>20} "
            f"{statistics.median(cores):>12.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
