"""Everything that a CUDA device can show in some minutes: make gpu-check, or
python -m benchmarks.gpu_check [--parts NAME …] [--results FILE]

Each part is a command of its own with a time limit. Parts that time nothing run side by side; then
the timed ones follow, one after another. A part prints its figures as lines `figure: NAME = NUMBER
UNIT`. The results are written after each part, so a run that is cut off keeps what it has, and a
second run with the same file goes on with the parts that have not passed. --table prints result
files as a table of docs/cuda.md. With --small the parts try themselves on a CPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

FIGURE = re.compile(r"^figure: (.+?) = (\S+) ?(.*)$", re.MULTILINE)
TAIL = 6000
"""Characters of a part's output that are kept."""


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        command: arguments of python.
        limit_s: seconds after which it is ended.
        small: arguments that let it run without a GPU; None = it needs one.
        is_timed: it needs the GPU for itself.
    """

    command: str
    limit_s: int
    small: str | None = None
    is_timed: bool = False


def _tests(*names: str) -> str:
    files = (f"tests/ops/test_cuda_{name}.py" for name in names)
    return "-m pytest -q -n 4 -p no:benchmark " + " ".join(files)


CHECK, FAMILIES = "-m benchmarks.cuda_check", "-m benchmarks.cuda_families"
GRAPHS = "-m benchmarks.cuda_graphs"
SERVING, ATTENTION = "-m benchmarks.cuda_serving", "-m benchmarks.cuda_attention"
ON_CPU = "--device cpu --small"
PARTS = {
    "kernels": Part(_tests("kernels", "adapters", "latent"), 120),
    "product kernels": Part(_tests("products"), 120),
    "expert kernels": Part(_tests("experts"), 150),
    "fp8 kernels": Part(_tests("fp8"), 120),
    "state kernels": Part(_tests("state", "branches", "families"), 120),
    "tokens of graphs": Part(f"{GRAPHS} --parts tokens memory", 150, ON_CPU),
    "tokens": Part(f"{CHECK} --parts tokens", 150, ON_CPU),
    "families": Part(FAMILIES, 120, ON_CPU),
    "pages": Part(f"{CHECK} --parts pages", 120, ON_CPU),
    "adapters": Part(f"{CHECK} --parts adapters", 120, ON_CPU),
    "ranks": Part("-m benchmarks.cuda_ranks --parts nccl processes", 120),
    "ranks of one GPU": Part("-m pytest -q tests/parallel/test_cuda_ranks.py", 100),
    "sums of ranks": Part("-m benchmarks.cuda_ranks --parts streams", 90, is_timed=True),
    "speed": Part(
        f"{CHECK} --parts speed --without-transformers --rows 1 64", 90, ON_CPU, is_timed=True
    ),
    "experts": Part("-m benchmarks.cuda_experts", 110, is_timed=True),
    "fp8 models": Part("-m benchmarks.cuda_products --model", 150, "--device cpu"),
    "products": Part("-m benchmarks.cuda_products", 90, is_timed=True),
    "speed of fp8": Part(
        f"{CHECK} --parts speed --without-transformers --rows 1 64 --quantization fp8",
        90,
        is_timed=True,
    ),
    "attention": Part(f"{ATTENTION} --parts check", 120, ON_CPU),
    "attention speed": Part(f"{ATTENTION} --parts speed", 90, ON_CPU, is_timed=True),
    "attention on hopper": Part(f"{ATTENTION} --parts hopper", 60, ON_CPU, is_timed=True),
    "graphs": Part(f"{GRAPHS} --parts hybrid prompts", 110, ON_CPU, is_timed=True),
    "states": Part(f"{GRAPHS} --parts states indexer", 90, ON_CPU, is_timed=True),
    "prompts": Part(f"{SERVING} --parts prompts", 90, ON_CPU, is_timed=True),
    "serving": Part(f"{SERVING} --parts serving", 120, ON_CPU, is_timed=True),
}
TOGETHER = 6
"""Parts side by side."""


@dataclass
class Result:
    """
    Attributes:
        state: passed, failed or timed out.
        figures: name -> number and unit.
        output: the last characters.
    """

    state: str
    seconds: float
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    output: str = ""


def main() -> int:
    options = _options()
    if options.table:
        print(table([json.loads(Path(path).read_text()) for path in options.table]))
        return 0
    gpu = describe(options.small)
    found = json.loads(options.results.read_text()) if options.results.exists() else {}
    parts: dict[str, object] = found.get("parts", {}) if found.get("gpu") == gpu else {}
    wanted = options.parts or [name for name in PARTS if not _has_passed(parts.get(name))]
    plain = [name for name in wanted if not PARTS[name].is_timed]
    timed = [name for name in wanted if PARTS[name].is_timed]
    failed = 0
    with ThreadPoolExecutor(TOGETHER) as pool:
        for name, result in chain(
            zip(
                plain,
                pool.map(lambda name: run(PARTS[name], options.small), plain),
                strict=True,
            ),
            ((name, run(PARTS[name], options.small)) for name in timed),
        ):
            failed += result.state != "passed"
            parts[name] = asdict(result)
            options.results.write_text(json.dumps({"gpu": gpu, "parts": parts}, indent=1))
            report(name, result)
    print(f"verdict: {f'{failed} parts failed' if failed else 'all parts passed'}")
    return int(failed > 0)


def _has_passed(before: object) -> bool:
    return isinstance(before, dict) and before.get("state") == "passed"


def run(part: Part, small: bool) -> Result:
    if small and part.small is None:
        return Result("passed", 0.0, output="needs a GPU")
    command = [sys.executable, *part.command.split(), *(part.small or "").split() * small]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=part.limit_s)
        state = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        state = f"ended after {part.limit_s} s"
    took = round(time.monotonic() - began, 1)
    figures = {name: (float(number), unit) for name, number, unit in FIGURE.findall(output)}
    return Result(state, took, figures, output[-TAIL:])


def report(name: str, result: Result) -> None:
    """Print the figures of a part and, if it failed, the end of its output."""
    print(f"== {name}: {result.state}, {result.seconds} s")
    for figure, (number, unit) in result.figures.items():
        print(f"  {figure}: {number:g} {unit}")
    print(result.output if result.state != "passed" else "", end="", flush=True)


def describe(small: bool) -> dict[str, object]:
    """What the results depend on: the GPU and the versions."""
    import torch

    if small:
        return {"name": "none", "torch": torch.__version__}
    import triton

    gpu = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "name": gpu.name,
        "memory_gib": round(gpu.total_memory / (1 << 30)),
        "capability": f"{gpu.major}.{gpu.minor}",
        "driver": driver.stdout.split("\n")[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def table(found: Sequence[dict[str, dict[str, dict[str, object]]]]) -> str:
    """A row for each figure, a column for each result file."""
    figures = [
        {name: pair for part in each["parts"].values() for name, pair in part["figures"].items()}  # type: ignore[union-attr]
        for each in found
    ]
    names = list(dict.fromkeys(name for column in figures for name in column))
    rows = [
        ["figure", *(str(each["gpu"]["name"]) for each in found)],
        ["---"] * (len(found) + 1),
    ]
    for name in names:
        cells = [f"{c[name][0]:g} {c[name][1]}".strip() if name in c else "" for c in figures]
        rows.append([name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="run these, passed before or not")
    parser.add_argument("--results", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--table", nargs="+", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
