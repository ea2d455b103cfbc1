"""Measures the peaks of this machine with the compiled library on all its threads."""

import time

import numpy as np

from banyan.ops.api import Peaks
from banyan.ops.cpu.library import Library

_READ_FLOATS = 64 << 20
"""256 MiB: larger than any cache, so the reads come from memory."""
_ROUNDS = 1_000_000
_PASSES = 40_000
_PATIENCE = 1 << 20
"""Most polls for a turn, of some nanoseconds each."""
_PIECES_PER_THREAD = 4
_RUNS = 5


def measure_peaks(library: Library) -> Peaks:
    """Best of five runs, half a second in all."""
    data = np.ones(_READ_FLOATS, np.float32)
    return Peaks(
        _best(library, 2, _READ_FLOATS, data),
        _best(library, 0, _ROUNDS, data),
        _best(library, 1, _ROUNDS, data),
        _best(library, 3, _ROUNDS, data),
        _passing(library),
    )


def _best(library: Library, kind: int, amount: int, data: np.ndarray) -> float:
    pieces = library.threads * _PIECES_PER_THREAD
    done = np.zeros(pieces, np.float64)
    best = 0.0
    for _ in range(_RUNS):
        began = time.perf_counter()
        library.call("bn_probe", pieces, kind, amount, data.ctypes.data, done.ctypes.data)
        best = max(best, float(done.sum()) / (time.perf_counter() - began))
    return best


def _passing(library: Library) -> float:
    """Seconds from core to core; 0 = one thread only, or the others do not answer."""
    if library.threads < 2:
        return 0.0
    turns, best = max(1, _PASSES // library.threads), 0.0
    for _ in range(_RUNS):
        line = np.zeros(1, np.int64)
        began = time.perf_counter()
        library.call("bn_probe_passing", library.threads, turns, _PATIENCE, line.ctypes.data)
        took = time.perf_counter() - began
        if line[0] > 0 and (not best or took / line[0] < best):
            best = took / int(line[0])
    return best
