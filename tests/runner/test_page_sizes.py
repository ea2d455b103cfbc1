"""Pages of one size are cut out of pages of another: the very bytes that kernels write there."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from banyan.disaggregation.page_cutting import Block, PageForm
from banyan.layers.cache_spec import CacheTensor, LayerCache, ShardedAxis
from banyan.model_config.model_config import STATE
from banyan.ops import reference
from banyan.ops.bind import open_toolkit
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.paged_attention import PagedAttention, parts_of_head
from banyan.ops.pages import stored_width
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.rank_page_access import PartsOfHead, forms_of, page_layouts_of

CPU = torch.device("cpu")
HEADS, DIM, TOKENS = 2, 8, 384
Write = Callable[..., None]


def writers() -> list[tuple[str, Write, PartsOfHead | None]]:
    found = [("plain", reference.write_kv, None)]
    toolkit = open_toolkit("cpu", 1, {})
    if isinstance(toolkit, Library) and not toolkit.absence:
        found.append(("by head", PagedAttention(toolkit).write_kv, parts_of_head))
    return found


def store_of(size: int, dtype: torch.dtype) -> KVStore:
    """Two layers of heads and one of latents, of so many tokens to a page."""
    kept = CacheTensor((HEADS, stored_width(DIM, dtype)), dtype, (ShardedAxis(HEADS, 0, HEADS),))
    layers = [LayerCache(at, {"k": kept, "v": kept}) for at in (0, 1)]
    layers.append(
        LayerCache(2, {"latent": CacheTensor((5,), dtype), "key": CacheTensor((3,), dtype)})
    )
    return KVStore((GroupLayout("full", 0, size, 1 + TOKENS // size),), layers, CPU)


def filled(size: int, dtype: torch.dtype, write: Write) -> KVStore:
    """The same tokens in pages of any size, one page after another."""
    store, draw = store_of(size, dtype), torch.Generator().manual_seed(5)
    where = torch.arange(size, size + TOKENS)
    for layer in (0, 1):
        k, v = torch.randn(2, TOKENS, HEADS, DIM, generator=draw)
        pages = store.tensors(layer)
        if write is reference.write_kv:
            write(k.to(dtype), v.to(dtype), pages["k"], pages["v"], where)
        else:
            write(k, v, pages["k"], pages["v"], where)
    for name, width in (("latent", 5), ("key", 3)):
        numbers = torch.randn(TOKENS, width, generator=draw).to(dtype)
        store.tensors(2)[name].view(-1, width)[where] = numbers
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", [0, 1], ids=["plain", "by head"])
def test_a_page_of_another_size_has_the_bytes_that_a_kernel_writes_there(
    kind: int, dtype: torch.dtype
) -> None:
    found = writers()
    if kind >= len(found):
        pytest.skip("there are no compiled kernels")
    _, write, by_head = found[kind]
    sizes = (16, 32, 64, 128) if kind else (1, 6, 16, 64)
    if not kind and dtype == torch.int8:
        write = _as_bytes
    stores = {size: filled(size, dtype, write) for size in sizes}
    for mine, store in stores.items():
        (form,) = forms_of(page_layouts_of(store), store.groups, by_head)
        assert form.size_bytes == store.page_bytes(0)
        pages = {at * mine: store.take(0, at + 1) for at in range(TOKENS // mine)}
        for theirs, other in stores.items():
            for at in range(TOKENS // theirs):
                first = at * theirs
                places = form.sources(first, theirs)
                page = form.cut({place: pages[place] for place in places}, first, theirs)
                assert (page == other.take(0, at + 1)).all(), (mine, theirs, at)
                tokens = sum(form.overlap(place, first, theirs) for place in places)
                assert tokens == theirs


def _as_bytes(k, v, k_pages, v_pages, where) -> None:
    for numbers, pages in ((k, k_pages), (v, v_pages)):
        rows = torch.arange(numbers.shape[0])[:, None, None] * 7 + numbers.to(torch.int8)
        wide = torch.nn.functional.pad(rows, (0, 4)).to(torch.int8)
        pages.view(-1, HEADS, pages.shape[-1])[where] = wide


def test_sizes_that_do_not_divide_each_other_are_cut_too() -> None:
    random = Random(3)
    for _ in range(200):
        mine, theirs = random.randint(1, 40), random.randint(1, 40)
        form = PageForm(mine, (Block(1, ((2, 3),)), Block(1, ((1, 5),))))
        whole = np.random.default_rng(1).integers(0, 255, (400, 11), np.uint8)

        def page(first: int, tokens: int, whole: np.ndarray = whole) -> np.ndarray:
            lie = whole[first : first + tokens]
            return np.concatenate([lie[:, :3].ravel(), lie[:, 3:6].ravel(), lie[:, 6:].ravel()])

        first = random.randrange(200 // theirs + 1) * theirs
        pages = {at: page(at, mine) for at in form.sources(first, theirs)}
        assert (form.cut(pages, first, theirs) == page(first, theirs)).all()


def test_states_and_what_is_spread_over_a_page_go_as_they_are() -> None:
    numbers, matrix = CacheTensor((4,), torch.float32), CacheTensor((2, 3), torch.float32)
    spread = replace(numbers, is_spread=True)
    groups = (GroupLayout("full", 0, 16, 4), GroupLayout(STATE, 0, 256, 4))
    held = [LayerCache(0, {"latent": numbers}), LayerCache(1, {"state": matrix}, STATE)]
    forms = forms_of(page_layouts_of(KVStore(groups, held, CPU)), groups, None)
    assert [form.takes(size) for form in forms for size in (0, 16, 32)] == [
        *(False, True, True),
        *(True, False, False),
    ]
    held[0] = LayerCache(0, {"latent": numbers, "end": spread})
    (fixed, _) = forms_of(page_layouts_of(KVStore(groups, held, CPU)), groups, None)
    assert fixed.takes(16) and not fixed.takes(32) and not fixed.takes(8)
    assert math.isclose(forms[0].size_bytes, 16 * 16)
