"""What rounded activations cost: `python -m benchmarks.rounding_cost`.

Whole steps of the engine with the kernels as they are, with kernels that keep no input apart, and
with fp32 activations, in turns, each engine idle while another runs. On a busy machine read the
ratios, those of processor time first.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

import banyan
from banyan.base.log import start_logging
from banyan.bench.evals import columns


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
    """Whole steps of three engines, in turns, each idle while another runs."""
    with ExitStack() as stack:
        other = stack.enter_context(_home_without_apart())
        engines = {
            "none kept apart": stack.enter_context(_timed(path, other)),
            "default": stack.enter_context(_timed(path, "")),
            "fp32": stack.enter_context(_timed(path, "", cpu_activations="fp32")),
        }
        draw = random.Random(1)
        rows = [["against none kept apart", *(f"{n}, {what}" for n in list(engines)[1:]
                                              for what in ("CPU time", "time"))]]  # fmt: skip
        for name, load in LOADS.items():
            found: dict[str, list[tuple[float, float]]] = {each: [] for each in engines}
            for number in range(rounds + 1):
                prompts = [draw.choices(range(1000, 40000), k=load.input_len)] * load.rows
                prompts = [[1 + at, *ids[1:]] for at, ids in enumerate(prompts)]
                turn = list(engines) if number % 2 else list(reversed(engines))
                for each in turn:
                    seconds = engines[each](prompts, load.output_len)
                    if number:  # the first one touches the cache's pages
                        found[each].append(seconds)
            rows.append([name, *_ratios(found)])
            print(".", end="", file=sys.stderr, flush=True)
    print("", file=sys.stderr)
    print("\n".join(columns(rows)))


def _ratios(found: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    first, *others = found.values()
    for other in others:
        for at in (0, 1):
            pairs = sorted(o[at] / f[at] for f, o in zip(first, other, strict=True))
            yield f"{statistics.median(pairs):.2f} [{pairs[0]:.2f}–{pairs[-1]:.2f}]"


@contextmanager
def _home_without_apart() -> Iterator[str]:
    """A home of its own for kernels that are compiled so that no input is kept apart."""
    home = tempfile.mkdtemp(prefix="banyan-rounding-")
    try:
        yield home
    finally:
        shutil.rmtree(home)


@contextmanager
def _timed(
    path: str, home: str, **flags: object
) -> Iterator[Callable[[list[list[int]], int], tuple[float, float]]]:
    """An engine; what it takes for prompts: (processor seconds, seconds)."""
    mine, before = os.environ["HOME"], set(psutil.Process().children(recursive=True))
    if home:
        os.environ["HOME"] = home
        flags["cpu_compiler"] = "g++ -DBN_BLOCKS_PER_APART=0"
    try:
        engine = banyan.Engine(model_path=path, log_level="warning", **flags)
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
