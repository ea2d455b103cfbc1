"""The memory of a rank's pages, and copies of pages."""

import pytest
import torch

from banyan.layers.cache_spec import CacheTensor, LayerCache, group_caches
from banyan.messages.plan import PageCopy, device_page
from banyan.model_config.model_config import FULL, STATE, WINDOW
from banyan.ops import reference
from banyan.ops.pages import stored_width
from banyan.runner.kvstore import GroupLayout, KVStore, zeros
from banyan.runner.slots import SlotTable

CPU = torch.device("cpu")
PAGE = 16


def keys_and_values(layer: int, heads: int, dim: int, dtype: torch.dtype, **more) -> LayerCache:
    kept = CacheTensor((heads, stored_width(dim, dtype)), dtype)
    return LayerCache(layer, {"k": kept, "v": kept}, **more)


def store_of(*caches: LayerCache, num_pages: int = 5) -> KVStore:
    layouts = (GroupLayout(g.kind, g.window, PAGE, num_pages) for g in group_caches(caches))
    return KVStore(tuple(layouts), caches, CPU)


MIXED = (
    LayerCache(0, {"latent": CacheTensor((40,), torch.float32)}),
    keys_and_values(1, 2, 24, torch.float16, kind=WINDOW, window=64),
    LayerCache(2, {"state": CacheTensor((3, 8, 8), torch.float32)}, STATE),
    keys_and_values(3, 1, 32, torch.int8),
    keys_and_values(4, 1, 8, torch.bfloat16, kind=WINDOW, window=64),
)
"""Layers of different kinds, shapes and number types in one model."""


def test_pages_take_the_bytes_that_they_are_counted_with():
    store = store_of(*MIXED)

    for group in group_caches(MIXED):
        taken = sum(t.nbytes for c in group.caches for t in store.tensors(c.layer).values())
        assert taken == 5 * group.page_bytes(PAGE)


def test_groups_are_kinds_and_windows_in_the_order_of_their_first_layers():
    groups = group_caches(MIXED)

    assert [(g.kind, g.window, [c.layer for c in g.caches]) for g in groups] == [
        (FULL, 0, [0, 3]),
        (WINDOW, 64, [1, 4]),
        (STATE, 0, [2]),
    ]
    store = store_of(*MIXED)
    assert [store.group_of(layer) for layer in range(5)] == [0, 1, 2, 0, 1]


def test_a_state_has_one_page_and_no_tokens_in_it():
    layout = GroupLayout(STATE, 0, PAGE, 5)
    pages, positions = torch.tensor([3, 3, 4]), torch.tensor([0, 99, 7])

    assert layout.columns(1) == layout.columns(1000) == 1
    assert layout.column(positions).tolist() == [0, 0, 0]
    assert layout.locate(pages, positions).tolist() == [3, 3, 4]
    assert store_of(*MIXED).tensors(2)["state"].shape == (5, 3, 8, 8)


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_copy_moves_every_tensor_of_its_group_and_no_other(copied):
    store = store_of(*MIXED)
    for layer in range(5):
        for tensor in store.tensors(layer).values():
            tensor[2] = 7

    store.copy([PageCopy(1, copied, device_page(2), device_page(4), "after")], "after")

    for layer in range(5):
        for tensor in store.tensors(layer).values():
            assert (tensor[4] == 7).all() == (store.group_of(layer) == copied)


def test_bytes_and_their_scales_move_with_their_page():
    store = store_of(keys_and_values(1, 2, 24, torch.int8))
    k_pages, v_pages = store.tensors(1).values()
    k, v = torch.randn(2, 16, 2, 24, generator=torch.Generator().manual_seed(0))
    reference.write_kv(k, v, k_pages, v_pages, torch.arange(32, 48))

    store.copy([PageCopy(1, 0, device_page(2), device_page(4), "after")], "after")

    for of, wanted in ((k_pages, k), (v_pages, v)):
        kept, _, _ = reference.gather_row(
            of, of, torch.tensor([4], dtype=torch.int32), torch.arange(16), 0
        )
        steps = wanted.abs().amax(-1, keepdim=True) / 127
        assert ((kept - wanted).abs() <= 0.5001 * steps).all()


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
