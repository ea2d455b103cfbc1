"""Measure the peak memory and arithmetic rates of this machine, the bounds for other figures."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from banyan.base.os import num_cores

_ARRAY_BYTES = 256 << 20
"""Larger than any cache, so that reads go to memory."""
_MATRIX = 1536
_RUNS = 5


@dataclass(frozen=True)
class MachinePeaks:
    """Upper bounds.

    Attributes:
        read_bytes_s: memory read by all cores at once.
        fp32_ops_s: multiplications and additions in float32.
        int8_ops_s, bf16_ops_s: the same in int8 and bf16; None if not measured.
        passing_s: latency of a write from one core to another; None if not measured.
    """

    cores: int
    read_bytes_s: float
    fp32_ops_s: float
    int8_ops_s: float | None = None
    bf16_ops_s: float | None = None
    passing_s: float | None = None

    def keys(self) -> dict[str, object]:
        return {
            "cores": self.cores,
            "read_gb_s": self.read_bytes_s / 1e9,
            "fp32_gflop_s": self.fp32_ops_s / 1e9,
            "int8_gop_s": None if self.int8_ops_s is None else self.int8_ops_s / 1e9,
            "bf16_gflop_s": None if self.bf16_ops_s is None else self.bf16_ops_s / 1e9,
            "passing_ns": None if self.passing_s is None else self.passing_s * 1e9,
        }

    def __str__(self) -> str:
        int8 = "int8 not measured"
        if self.int8_ops_s is not None:
            int8 = f"int8 {self.int8_ops_s / 1e9:.0f} GOP/s"
        bf16 = f", bf16 {self.bf16_ops_s / 1e9:.0f} GFLOP/s" if self.bf16_ops_s else ""
        passing = f", {self.passing_s * 1e9:.0f} ns from core to core" if self.passing_s else ""
        return (
            f"{self.cores} cores, read {self.read_bytes_s / 1e9:.1f} GB/s, "
            f"fp32 {self.fp32_ops_s / 1e9:.0f} GFLOP/s, {int8}{bf16}{passing}"
        )


def probe() -> MachinePeaks:
    """Measure this machine, in about half a second; the best of five runs counts."""
    cores = num_cores()
    parts = np.array_split(np.ones(_ARRAY_BYTES // 8, dtype=np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        read_s = _best_of(lambda: list(pool.map(np.bitwise_or.reduce, parts)))
    square = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    multiply_s = _best_of(lambda: square @ square)
    return MachinePeaks(cores, _ARRAY_BYTES / read_s, 2 * _MATRIX**3 / multiply_s)


def _best_of(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
