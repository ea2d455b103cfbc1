"""Latent attention in Triton against the reference; `triton_device.py` tells where they run."""

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import products, triton_latent
from banyan.ops.stored import StoredWeight
from tests.ops.triton_device import ABSENCE, DEVICE, PAGE, SHAPES, TYPES, close, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

COLUMNS = 24
MIXED = [(0, 35), (33, 1), (3, 10), (0, 1)]
LONG = [(330, 1), (0, 1), (129, 1), (255, 1)]


def world(rows, rank, rope_dim, dtype, first=0):
    """Page tables, starts, contexts, and pages that are no numbers where nothing may be read."""
    counts = torch.tensor([count for _, count in rows])
    contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    tables = torch.randperm(len(rows) * COLUMNS, generator=torch.Generator().manual_seed(1)) + 1
    tables = tables.view(len(rows), COLUMNS).to(torch.int32)
    shape = (len(rows) * COLUMNS + 1, PAGE)
    pages = [random(*shape, width, dtype=dtype, seed=width) for width in (rank, rope_dim)]
    for row, (context, count) in enumerate(rows):
        for at in (*range(first), *range(context + count, COLUMNS * PAGE)):
            for part in pages:
                part[tables[row, at // PAGE].item(), at % PAGE] = float("nan")
    return pages, [x.to(DEVICE) for x in (tables, starts, contexts)], int(counts.sum())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "parts"), [(SHAPES[0], None), (MIXED, 1), (MIXED, 4), (LONG, 1), (LONG, 4)], ids=str
)
@pytest.mark.parametrize(
    ("heads", "rank", "rope_dim", "first"), [(4, 64, 16, 0), (20, 40, 24, 0), (3, 512, 64, 5)]
)
def test_latent_attention_is_that_of_the_reference(
    rows, heads, rank, rope_dim, first, dtype, parts, monkeypatch
):
    if first:
        rows = [(max(context, first), count) for context, count in rows]
    if parts is not None:
        monkeypatch.setattr(triton_latent, "_parts", lambda *_: parts)
    pages, where, tokens = world(rows, rank, rope_dim, dtype, first)
    q = random(tokens, heads, rank + 8, dtype=dtype)[..., :rank]
    turned = random(tokens, heads * 2, rope_dim, dtype=dtype, seed=5)[:, ::2]
    scale = (rank + rope_dim) ** -0.5

    got = triton_latent.latent_attention.run(q, turned, *pages, *where, scale, None, first)

    double = [part.double() for part in (q, turned, *pages)]
    close(got, reference.latent_attention(*double, *where, scale, None, first), dtype)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tokens_read_what_was_chosen_for_them_alone(dtype, parts, monkeypatch):
    monkeypatch.setattr(triton_latent, "_parts", lambda *_: parts)
    pages, where, tokens = world(LONG, 48, 16, dtype)
    q, turned = random(tokens, 6, 48, dtype=dtype), random(tokens, 6, 16, dtype=dtype, seed=5)
    keep = random(tokens, COLUMNS * PAGE // 32, 32, seed=9) > 0.9
    keep[:, 0, 0] = True
    worth = 1 << torch.arange(32, device=DEVICE)
    chosen = (keep * worth).sum(-1).to(torch.int32)

    got = triton_latent.latent_attention.run(q, turned, *pages, *where, 0.2, chosen)

    double = [part.double() for part in (q, turned, *pages)]
    close(got, reference.latent_attention(*double, *where, 0.2, chosen), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (37, 6)])
def test_latents_are_written_where_they_belong(rank, rope_dim, dtype):
    kept = random(5, rank + rope_dim, dtype=dtype)
    latent, key = kept.split([rank, rope_dim], dim=-1)
    locations = torch.tensor([17, 3, 95, 16, 40], device=DEVICE)
    mine, theirs = (
        [torch.zeros(6, PAGE, width, dtype=dtype, device=DEVICE) for width in (rank, rope_dim)]
        for _ in range(2)
    )

    triton_latent.write_latent.run(latent, key, *mine, locations)
    reference.write_latent(latent, key, *theirs, locations)

    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_no_grid_and_no_division_depends_on_lengths(monkeypatch):
    """A launch that was captured serves rows of any length."""
    seen = []
    monkeypatch.setattr(triton_latent, "_parts", lambda *sizes: seen.append(sizes) or 2)
    for contexts in ([0, 0], [300, 7]):
        pages, where, tokens = world([(context, 1) for context in contexts], 32, 16, torch.float32)
        parts = random(tokens, 2, 32), random(tokens, 2, 16)
        triton_latent.latent_attention.run(*parts, *pages, *where, 0.2)
    assert seen[0] == seen[1]


def test_few_queries_share_their_keys_among_many_programs():
    assert triton_latent._parts(1, 1 << 20) == 64
    assert triton_latent._parts(2, 400) == 4
    assert triton_latent._parts(100, 1 << 20) == 2
    assert triton_latent._parts(5000, 1 << 20) == 1
    assert triton_latent._parts(1, 16) == 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_head_is_multiplied_with_its_own_matrix(dtype):
    weight = StoredWeight.from_tensor(random(3, 24, 40, dtype=dtype).cpu())
    where = torch.device(DEVICE)
    x = random(7, 3, 96, dtype=dtype, seed=4)[..., 8:48]
    got = products.head_linear.run(weight, dtype, where, True)(x)
    exact = reference.pack_head_linear(weight, torch.float64, where, True)
    assert got.is_contiguous()
    close(got / 40**0.5, exact(x.double()) / 40**0.5, dtype)
