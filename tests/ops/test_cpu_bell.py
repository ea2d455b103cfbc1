"""The eventfd that a run rings: once, when it has begun."""

import os

import pytest
import torch

from banyan.ops.cpu.library import Library
from banyan.ops.cpu.rows import Rows


@pytest.fixture
def library(path):
    library = Library(path, 2)
    yield library
    library.close()


def test_the_next_run_rings_once(library):
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    rows, x = Rows(library), torch.ones(3, 8)
    try:
        library.ring_next(bell)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)
        rows.add(x, x)
        rows.add(x, x)
        assert os.eventfd_read(bell) == 1
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)
    finally:
        os.close(bell)
