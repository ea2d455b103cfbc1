"""A run writes to the wake eventfd once, when it begins."""

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


def test_the_next_run_writes_once(library):
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    rows, x = Rows(library), torch.ones(3, 8)
    try:
        library.wake_next(wake_fd)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(wake_fd)
        rows.add(x, x)
        rows.add(x, x)
        assert os.eventfd_read(wake_fd) == 1
        with pytest.raises(BlockingIOError):
            os.eventfd_read(wake_fd)
    finally:
        os.close(wake_fd)
