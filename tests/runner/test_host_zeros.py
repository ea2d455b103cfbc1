"""Zeros that take no memory until something is written."""

import pytest
import torch

from banyan.kv_cache.groups import FULL
from banyan.runner.kvstore import GroupLayout, zeros
from banyan.runner.slots import SlotTable

MIB = 1 << 20
CPU = torch.device("cpu")


def own_bytes() -> int:
    """Memory that this process has for itself."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        lines = [line.split() for line in file]
    return next(int(line[1]) << 10 for line in lines if line[0] == "Anonymous:")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16])
def test_they_are_zeros_of_that_shape_and_kind(dtype):
    found = zeros((3, 5), dtype, CPU)
    assert torch.equal(found, torch.zeros((3, 5), dtype=dtype)) and found.dtype == dtype
    found[1, 2] = 1
    assert found.sum() == 1
    assert zeros((0, 5), dtype, CPU).shape == (0, 5)


def test_they_take_memory_where_something_is_written():
    before = own_bytes()
    found = zeros((64, MIB), torch.uint8, CPU)
    assert own_bytes() < before + 8 * MIB
    found[:32] = 1
    assert before + 32 * MIB <= own_bytes() < before + 40 * MIB


def test_slots_that_nobody_has_joined_take_no_memory_for_their_tokens():
    before = own_bytes()
    table = SlotTable(511, 1 << 15, 1000, (GroupLayout(FULL, 0, 16, 512),), CPU)
    assert table.tokens.nbytes > 64 * MIB
    assert own_bytes() < before + 16 * MIB
    assert not table.tokens[511].any()
