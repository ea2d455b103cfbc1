"""What the machine can do at most, as the compiled library finds it."""

import numpy as np
import pytest

from banyan.ops.cpu.library import Library, measure_peaks


@pytest.fixture
def library(path):
    library = Library(path, 2)
    yield library
    library.close()


def test_peaks_are_measured_on_all_threads(library: Library) -> None:
    peaks = measure_peaks(library)
    assert peaks.read_bytes_s > 1e8 and peaks.fp32_ops_s > 1e8
    assert not peaks.int8_ops_s or peaks.int8_ops_s > peaks.fp32_ops_s / 8
    assert not peaks.passing_s or 1e-9 < peaks.passing_s < 1e-3


@pytest.mark.parametrize(("kind", "inputs"), [(1, 64), (3, 32)])
def test_the_peaks_of_a_machine_with_tiles_are_those_of_tiles(
    library: Library, kind: int, inputs: int
) -> None:
    if library.isa != "amx":
        pytest.skip("for tiles")
    done = np.zeros(3, np.float64)
    library.call("bn_probe", 3, kind, 8, 0, done.ctypes.data)
    assert (done == 8 * 2.0 * 16 * 16 * inputs).all()


def test_a_number_goes_around_all_threads(library: Library) -> None:
    line = np.zeros(1, np.int64)
    library.call("bn_probe_passing", library.threads, 10, 1 << 28, line.ctypes.data)
    assert line[0] == 10 * library.threads


def test_who_waits_for_a_thread_that_does_not_come_gives_up(library: Library) -> None:
    line = np.full(1, 7, np.int64)
    library.call("bn_probe_passing", library.threads, 10, 1 << 20, line.ctypes.data)
    assert line[0] == -1
