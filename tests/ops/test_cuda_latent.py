"""Latent attention in Triton against the reference; `triton_device.py` says where they run."""

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


def index_inputs(tokens, heads, width, rope_dim, dtype, is_coarse):
    """Coarse ones have exact scores, many of them equal."""
    parts = [
        random(tokens, heads, width, dtype=dtype, seed=1),
        random(tokens, heads, rope_dim, dtype=dtype, seed=2),
        random(tokens, heads, dtype=dtype, seed=3),
    ]
    return [part.round() for part in parts] if is_coarse else parts


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "first"), [(SHAPES[0], 0), (MIXED, 0), (LONG, 0), (LONG, 1)], ids=str
)
@pytest.mark.parametrize(("heads", "width", "rope_dim", "top"), [(3, 24, 8, 7), (20, 64, 64, 64)])
def test_the_positions_with_the_best_scores_are_chosen(
    rows, first, heads, width, rope_dim, top, dtype, monkeypatch
):
    """Scores of whole numbers, so that sums are exact; equal ones go by position."""
    monkeypatch.setattr(triton_latent, "_TILE", 64)
    monkeypatch.setattr(triton_latent, "_SCORES", 20 * COLUMNS * PAGE)  # 20 tokens at once
    rows = [(max(context, first), count) for context, count in rows]
    pages, where, tokens = world(rows, width, rope_dim, dtype, first)
    pages = [part.round() for part in pages]
    given = index_inputs(tokens, heads, width, rope_dim, dtype, True)

    got = triton_latent.choose_positions.run(*given, *pages, *where, top, first)

    double = [part.double() for part in (*given, *pages)]
    assert torch.equal(got, reference.choose_positions(*double, *where, top, first))


def test_what_is_chosen_is_near_the_best_where_sums_are_rounded():
    pages, where, tokens = world(LONG, 64, 64, torch.float16)
    given = index_inputs(tokens, 8, 64, 64, torch.float16, False)

    got = triton_latent.choose_positions.run(*given, *pages, *where, 100)

    double = [part.double() for part in (*given, *pages)]
    want = reference.choose_positions(*double, *where, 100)
    mine, theirs = reference.unpack_bits(got), reference.unpack_bits(want)
    assert torch.equal(mine.sum(1), theirs.sum(1))
    assert (mine != theirs).sum() <= 4
