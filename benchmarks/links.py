"""What this machine gives `banyan simulate`: memory, matrix units and the link between two ranks.

    python -m benchmarks.links [--library shared|gloo] > here.json
    banyan simulate --hardware here.json --layouts tp=1 tp=2

The link is measured with sums of two ranks: the time of a tiny one is two hops, and what a large
one takes beyond it is its bytes.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from statistics import median

import torch

from banyan.bench.probe import probe
from banyan.ops.cpu.build import cached_library
from banyan.ops.cpu.library import Library
from banyan.parallel.collectives import COLLECTIVES, Meeting
from banyan.platform import open_platform

_SIZES = (256, 4 << 20)
"""Bytes of the tiny sum and of the large one."""
_RUNS = 200
_RANKS = 2


def rank_of(out: Connection, rank: int, address: str, name: str) -> None:
    """Median seconds of a sum of each size."""
    torch.set_num_threads(1)
    library = Library(cached_library(), 1) if name == "shared" else None
    link = COLLECTIVES.load(name).open(Meeting(rank, _RANKS, address, 60.0, library))
    out.send([_seconds(link.all_reduce, torch.zeros(1, size // 4)) for size in _SIZES])


def _seconds(work, x) -> float:
    took = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        work(x)
        took.append(time.perf_counter() - began)
    return median(took)


def measure(name: str) -> tuple[float, float]:
    """(bytes per second of the link, seconds of one hop)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_of, args=(theirs, rank, f"file://{folder}/meet", name))
            for rank in range(_RANKS)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        found = [ours.recv() for _ in ranks]
        for process in ranks:
            process.join()
    tiny_s, large_s = (max(column) for column in zip(*found, strict=True))
    hop_s = tiny_s / 2
    return _SIZES[1] / max(1e-9, large_s - tiny_s), hop_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=("shared", "gloo"), default="shared")
    library = parser.parse_args().library
    machine = probe()
    memory = open_platform("cpu").memory()
    bytes_s, hop_s = measure(library)
    print(machine, file=sys.stderr)
    figures = {
        "memory_gib": memory.total_bytes / (1 << 30),
        "bytes_per_s": machine.read_bytes_s,
        "flops_per_s": machine.fp32_ops_s,
        "link_bytes_per_s": bytes_s,
        "link_s": hop_s,
        "overhead_s": 1e-3,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
