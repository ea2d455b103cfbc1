"""What the pages of a rank take, and that a copied page carries all of it."""

import pytest
import torch

from banyan.messages.plan import PageCopy
from banyan.ops import reference
from banyan.runner.kvstore import GroupLayout, KVStore

CPU = torch.device("cpu")
LAYOUT = GroupLayout(page_size=16, num_pages=5, layers=(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_page_takes_the_bytes_that_it_is_counted_with(card, dtype):
    store = KVStore((LAYOUT,), card.num_kv_heads, card.head_dim, dtype, CPU)

    taken = sum(pages.nbytes for layer in LAYOUT.layers for pages in store.layer(layer))

    page_bytes = KVStore.bytes_per_page(card, len(LAYOUT.layers), LAYOUT.page_size, dtype, 1)
    assert taken == LAYOUT.num_pages * page_bytes


def test_bytes_and_their_scales_move_with_their_page():
    store = KVStore((LAYOUT,), 2, 24, torch.int8, CPU)
    k_pages, v_pages = store.layer(1)
    k, v = torch.randn(2, 16, 2, 24, generator=torch.Generator().manual_seed(0))
    reference.write_kv(k, v, k_pages, v_pages, torch.arange(32, 48))

    store.copy([PageCopy(id=1, group=0, src=2, dst=4, when="after")], "after")

    for of, wanted in ((k_pages, k), (v_pages, v)):
        kept, _, _ = reference.gather_row(
            of, of, torch.tensor([4], dtype=torch.int32), torch.arange(16), 0
        )
        steps = wanted.abs().amax(-1, keepdim=True) / 127
        assert ((kept - wanted).abs() <= 0.5001 * steps).all()
