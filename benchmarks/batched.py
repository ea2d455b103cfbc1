"""One static batch without HTTP, beside llama.cpp's own bench and those of its forks:
`python -m benchmarks.batched MODEL.gguf --beside PATH/llama-batched-bench [PATH ...]`.

Each round runs every engine once for each number of rows, forwards and back, so that a slower
minute of the machine slows all. Told are medians of the rounds with their least and most, and the
median ratio to the best other engine, taken round by round.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from banyan.bench.probe import probe
from benchmarks.machine import PeerError

Rates = tuple[float, float]
"""Tokens/s of the prompts and of decoding, all rows together."""
Engine = Callable[[int], Rates]
_CELLS = 10
"""Of a line of `llama-batched-bench`: PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S."""


def ours(options: argparse.Namespace) -> Engine:
    def measure(rows: int) -> Rates:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.jsonl"
            words = [
                sys.executable,
                "-m",
                "banyan",
                "bench",
                "batch",
                "--model-path",
                options.model,
            ]
            words += ["--batch-size", str(rows)]
            words += ["--input-len", str(options.input_len)]
            words += ["--output-len", str(options.output_len + 1), "--result-filename", str(path)]
            _run(words)
            keys = json.loads(path.read_text().splitlines()[-1])
        decode_s = keys["total_latency"] - keys["prefill_latency"]
        return keys["prefill_throughput"], rows * options.output_len / decode_s

    return measure


def theirs(program: str, options: argparse.Namespace) -> Engine:
    threads = str(len(os.sched_getaffinity(0)))
    context = max(options.rows) * (options.input_len + options.output_len)

    def measure(rows: int) -> Rates:
        words = [
            str(Path(program).resolve()),
            "-m",
            options.model,
            "-t",
            threads,
            "-tb",
            threads,
            "-c",
            str(context),
        ]
        words += ["-npp", str(options.input_len), "-ntg", str(options.output_len)]
        with tempfile.TemporaryDirectory() as folder:  # where it leaves its log
            return read_table(_run([*words, "-npl", str(rows)], folder))

    return measure


def read_table(text: str) -> Rates:
    """The rates of the last line of figures.

    Raises:
        PeerError: there is none.
    """
    for line in reversed(text.splitlines()):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == _CELLS and all(re.fullmatch(r"[0-9.]+", cell) for cell in cells):
            return float(cells[5]), float(cells[7])
    raise PeerError(f"no line of {_CELLS} figures in: {text[-500:]}")


def _run(words: Sequence[str], folder: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        raise PeerError(f"{words[0]} ended with {done.returncode}: {last}")
    return done.stdout + done.stderr


def table(found: dict[str, dict[int, list[Rates]]], rows: Sequence[int]) -> str:
    """Markdown; the first engine is ours."""
    mine, *others = found
    lines = [f"| rows | figure | {' | '.join(found)} | {mine} / best other |"]
    lines.append("| --- " * (len(found) + 3) + "|")
    for count in rows:
        for place, figure in enumerate(("prompts, tokens/s", "decode, tokens/s")):
            values = {name: [rates[place] for rates in found[name][count]] for name in found}
            cells = [_spread(values[name], 0) for name in found]
            best = max(others, key=lambda name: statistics.median(values[name]))
            ratios = [a / b for a, b in zip(values[mine], values[best], strict=True)]
            cells.append(f"{_spread(ratios, 2)} ({best})")
            lines.append(f"| {count} | {figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    least, median, most = (
        f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{median} [{least}–{most}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="batched", description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--beside", nargs="+", required=True, metavar="PROGRAM")
    parser.add_argument("--names", nargs="+", default=[], help="of the programs, in their order")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.model = str(Path(options.model).resolve())
    names = options.names or options.beside
    if len(names) != len(options.beside):
        parser.error(f"{len(names)} names for {len(options.beside)} programs")
    engines = {"Banyan": ours(options)}
    engines |= {n: theirs(p, options) for n, p in zip(names, options.beside, strict=True)}
    found: dict[str, dict[int, list[Rates]]] = {n: {r: [] for r in options.rows} for n in engines}
    print(f"{probe()}; {options.input_len} tokens in, {options.output_len} out", flush=True)
    for number in range(options.rounds):
        turn = list(engines) if number % 2 == 0 else list(reversed(engines))
        for rows in options.rows:
            for name in turn:
                found[name][rows].append(engines[name](rows))
    print(table(found, options.rows))


if __name__ == "__main__":
    main()
