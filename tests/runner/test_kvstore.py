"""What the pages of a rank take, and that a copied page carries all of it."""

import pytest
import torch

from banyan.layers.cache_spec import CacheTensor, LayerCache, group_caches
from banyan.messages.plan import PageCopy, device_page
from banyan.model_config.model_config import FULL, STATE, WINDOW
from banyan.ops import reference
from banyan.ops.pages import stored_width
from banyan.runner.kvstore import GroupLayout, KVStore

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
