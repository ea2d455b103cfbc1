"""What rounded activations cost: `python -m benchmarks.rounding_cost`.

Whole steps of two engines in turns, each idle while the other runs: one with the kernels as they
are, one with kernels that keep no input apart. Shown are medians of the ratios of pairs, least and
most beside them; on a busy machine those of processor time tell more.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

import banyan
from banyan.base.log import start_logging


@dataclass(frozen=True)
class Load:
    """Requests that begin together."""

    rows: int
    input_len: int
    output_len: int


LOADS = {
    "decode, 1 row": Load(1, 16, 96),
    "decode, 8 rows": Load(8, 16, 48),
    "decode, 32 rows": Load(32, 16, 24),
    "prefill, 1,024 tokens": Load(1, 1024, 1),
}


def cost(path: str, rounds: int) -> None:
    """Prints a line for each load as soon as it is known."""
    show("default / none kept apart", "processor time", "time")
    with ExitStack() as stack:
        other = stack.enter_context(_home_without_apart())
        plain = stack.enter_context(_timed(path, other))
        default = stack.enter_context(_timed(path, ""))
        draw = random.Random(1)
        for name, load in LOADS.items():
            ratios: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                shared = draw.choices(range(1000, 40000), k=load.input_len)
                prompts = [[1 + at, *shared[1:]] for at in range(load.rows)]
                turn = (plain, default) if number % 2 else (default, plain)
                found = {run: run(prompts, load.output_len) for run in turn}
                if number:  # the first one touches the cache's pages
                    mine, theirs = found[default], found[plain]
                    ratios.append((mine[0] / theirs[0], mine[1] / theirs[1]))
            show(name, *(_spread(column) for column in zip(*ratios, strict=True)))


def show(name: str, *cells: str) -> None:
    print(f"{name:<28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]"


@contextmanager
def _home_without_apart() -> Iterator[str]:
    """A home of its own for kernels that are compiled so that no input is kept apart."""
    home = tempfile.mkdtemp(prefix="banyan-rounding-")
    try:
        yield home
    finally:
        shutil.rmtree(home)


@contextmanager
def _timed(path: str, home: str) -> Iterator[Callable[[list[list[int]], int], tuple[float, float]]]:
    """An engine; what it takes for prompts: (processor seconds, seconds)."""
    mine, before = os.environ["HOME"], set(psutil.Process().children(recursive=True))
    if home:
        os.environ["HOME"] = home
    compiler = "g++ -DBN_BLOCKS_PER_APART=0" if home else "g++"
    try:
        engine = banyan.Engine(model_path=path, log_level="warning", cpu_compiler=compiler)
    finally:
        os.environ["HOME"] = mine
    processes = set(psutil.Process().children(recursive=True)) - before

    def run(prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        asked = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        spent, began = _spent(processes), time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=asked)
        seconds = time.perf_counter() - began
        return _spent(processes) - spent, seconds

    try:
        yield run
    finally:
        engine.shutdown()


def _spent(processes: set[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="rounding_cost", description=__doc__)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--rounds", type=int, default=5, help="of each load")
    options = parser.parse_args()
    start_logging("rounding", "warning")
    cost(options.model_path, options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
